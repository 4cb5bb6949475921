"""How many programs share one processor of a GPU, and what stands in the way of more.

NVIDIA, "CUDA C++ Programming Guide", table "Technical specifications per compute capability".
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
# Registers are handed out by the warp, in units; warps by the four schedulers of a processor.
REGISTER_UNIT, WARP_UNIT, WARP_SIZE = 256, 4, 32


@dataclass(frozen=True)
class Processor:
    """The limits of one streaming multiprocessor (SM).

    Attributes:
        shared_bytes: shared memory for all programs together.
        shared_bytes_per_program: the most that one program may have.
        reserved_bytes: shared memory that the system takes from every program.
        registers: 32-bit registers.
        max_warps, max_programs: how many can be resident at once.
    """

    shared_bytes: int
    shared_bytes_per_program: int
    reserved_bytes: int
    max_warps: int
    max_programs: int
    registers: int = 65536


PROCESSORS = {
    "sm_75": Processor(64 * KIB, 64 * KIB, 0, 32, 16),  # T4
    "sm_80": Processor(164 * KIB, 163 * KIB, KIB, 64, 32),  # A100
    "sm_86": Processor(100 * KIB, 99 * KIB, KIB, 48, 16),  # RTX 30, A10
    "sm_89": Processor(100 * KIB, 99 * KIB, KIB, 48, 24),  # RTX 40, L4
    "sm_90": Processor(228 * KIB, 227 * KIB, KIB, 64, 32),  # H100, H200
    "sm_100": Processor(228 * KIB, 227 * KIB, KIB, 64, 32),  # B200
    "sm_120": Processor(100 * KIB, 99 * KIB, KIB, 48, 24),  # RTX 50
}


@dataclass(frozen=True)
class Occupancy:
    """Programs resident on one SM, and which resource allows no more.

    Attributes:
        programs: resident programs (thread blocks); 0 if one does not even fit.
        warps: resident warps.
        max_warps: what the SM could hold.
        limit: ``"shared memory"``, ``"registers"``, ``"warps"`` or ``"programs"``.
    """

    programs: int
    warps: int
    max_warps: int
    limit: str

    @property
    def share(self) -> float:
        """Resident warps over those the SM could hold, 0 to 1."""
        return self.warps / self.max_warps


def occupancy(target: str, *, shared_bytes: int, registers: int, threads: int) -> Occupancy:
    """How many copies of a program fit on one SM.

    Args:
        target: one of :data:`PROCESSORS`.
        shared_bytes: shared memory of one program.
        registers: 32-bit registers of one thread, 1 to 255.
        threads: threads of one program, a multiple of 32.

    Raises:
        ValueError: an argument is out of range.
    """
    if target not in PROCESSORS:
        raise ValueError(f"target must be one of {', '.join(PROCESSORS)}, got {target!r}")
    if threads < 1 or threads % WARP_SIZE:
        raise ValueError(f"threads must be a positive multiple of {WARP_SIZE}, got {threads}")
    if not 1 <= registers <= 255:
        raise ValueError(f"registers must be between 1 and 255 a thread, got {registers}")
    if shared_bytes < 0:
        raise ValueError(f"shared_bytes must not be negative, got {shared_bytes}")
    chip = PROCESSORS[target]
    warps = threads // WARP_SIZE
    per_warp = _round_up(registers * WARP_SIZE, REGISTER_UNIT)
    warps_by_registers = chip.registers // per_warp // WARP_UNIT * WARP_UNIT
    too_large = shared_bytes > chip.shared_bytes_per_program
    taken = shared_bytes + chip.reserved_bytes
    fits = {
        "shared memory": 0 if too_large else (chip.shared_bytes // taken if taken else 10**6),
        "registers": warps_by_registers // warps,
        "warps": chip.max_warps // warps,
        "programs": chip.max_programs,
    }
    limit = min(fits, key=lambda name: fits[name])
    programs = fits[limit]
    return Occupancy(programs, programs * warps, chip.max_warps, limit)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
