"""What a submission may use, what it is shut into, and how everything it started is ended."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import flashcourse
from flashcourse.grading import confine
from flashcourse.grading.observe import SHARE

GIB = 2**30
PACKAGE = Path(flashcourse.__file__).parent
SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/nix"),
    *("/etc", "/proc", "/sys", "/dev", "/run", "/var/lib"),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/dri", "/dev/kfd")
KEPT_VARIABLES = (
    *("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION"),
    # Triton compiles the launcher of every kernel with a C compiler.
    *("CC", "CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH"),
    *("TRITON_INTERPRET", "TRITON_LIBCUDA_PATH", "TRITON_PTXAS_PATH"),
    # Multicast can put GPUs that others share out of service: who switched it off meant it.
    *("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"),
    *("FLASHCOURSE_QUESTIONS", SHARE),
)


class SandboxError(RuntimeError):
    """The isolation that was asked for is not to be had on this machine."""


@dataclass(frozen=True)
class Limits:
    """What one submission may use.

    Attributes:
        seconds: for one question, of waiting for its answer.
        document_seconds: for the whole notebook, run as a document.
        memory: bytes, of all its processes together.
        processes: how many may live at once.
        file_bytes: the largest file it may write.
    """

    seconds: float = 120.0
    document_seconds: float = 300.0
    memory: int = 4 * GIB
    processes: int = 64
    file_bytes: int = 256 * 2**20


@dataclass(frozen=True)
class Sandbox:
    """How a submission's processes are shut in.

    Attributes:
        kind: ``bwrap``, ``landlock``, ``command`` or ``none``.
        namespaces: with ``landlock``: also its own processes and network.
        command: with ``command``: the lecturer's words, ``{folder}`` and ``{command}`` included.
    """

    kind: str
    namespaces: bool = False
    command: str = ""

    def describe(self) -> str:
        """What it keeps from happening, for the report."""
        if self.kind == "bwrap":
            return "bubblewrap: own files, processes and network"
        if self.kind == "command":
            return f"the lecturer's command: {self.command}"
        if self.kind == "landlock":
            more = "own processes and network" if self.namespaces else "the network is NOT cut off"
            return f"Landlock: files outside its folder cannot be written; {more}"
        return "none: limits only; files and network are NOT protected"


def choose_sandbox(wanted: str) -> Sandbox:
    """The isolation to use.

    Args:
        wanted: ``auto``, ``bwrap``, ``landlock``, ``none``, or a command with ``{command}`` in it.

    Raises:
        SandboxError: it was asked for by name and does not work here.
    """
    if "{command}" in wanted:
        return Sandbox("command", command=wanted)
    if wanted == "none":
        return Sandbox("none")
    if wanted not in ("auto", "bwrap", "landlock"):
        raise SandboxError(
            f"sandbox must be auto, bwrap, landlock, none or a command that contains {{command}}, "
            f"got {wanted!r}"
        )
    if wanted in ("auto", "bwrap"):
        if _works(("bwrap", "--ro-bind", "/", "/", "--unshare-all", "--proc", "/proc")):
            return Sandbox("bwrap")
        if wanted == "bwrap":
            raise SandboxError("bwrap does not work here: install bubblewrap, or choose another")
    if confine.landlock_version() >= 1:
        return Sandbox("landlock", namespaces=_works(NAMESPACES))
    if wanted == "landlock":
        raise SandboxError("this kernel has no Landlock (Linux 5.13 or newer, enabled)")
    return Sandbox("none")


NAMESPACES = (
    *("setpriv", "--pdeathsig", "KILL"),  # what it starts ends with the grader, however that ends
    *("unshare", "--user", "--map-root-user", "--net", "--pid", "--ipc"),
    *("--fork", "--kill-child=SIGKILL", "--mount-proc"),
)


@functools.cache
def _works(prefix: tuple[str, ...]) -> bool:
    if shutil.which(prefix[0]) is None:
        return False
    try:
        run = subprocess.run([*prefix, "true"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return run.returncode == 0


def command_line(
    sandbox: Sandbox, limits: Limits, folder: Path, program: list[str], *, gpu: bool
) -> list[str]:
    """The words that start a program in the sandbox with its folder as the only one to write to."""
    if sandbox.kind == "command":  # in a container Python lies somewhere else
        words = shlex.split(sandbox.command.replace("{folder}", shlex.quote(str(folder))))
        inside = ["python", *program[1:]]
        return [part for word in words for part in (inside if word == "{command}" else [word])]
    readable = _readable()
    settings = {
        "limits": _resource_limits(limits, gpu=gpu),
        "landlock": sandbox.kind == "landlock",
        "own_network": sandbox.namespaces or sandbox.kind == "bwrap",
        "own_mounts": sandbox.namespaces,
        "gpu": gpu,
        "listable": [str(PACKAGE.parent)],  # else Python does not find the package in there
        "readable": [*readable, str(folder)],
        "writable": [str(folder), *DEVICES, *map(str, Path("/dev").glob("nvidia*"))],
    }
    confined = [sys.executable, "-I", "-S", confine.__file__, json.dumps(settings), *program]
    if sandbox.kind == "bwrap":
        return [*_bubblewrap(folder, readable, gpu=gpu), *confined]
    return [*NAMESPACES, *confined] if sandbox.namespaces else confined


def _readable() -> list[str]:
    """Folders a program needs in order to run: the system, Python, this package. Not its parent,
    where the solutions lie."""
    own = [sys.prefix, sys.base_prefix, *site.getsitepackages(), str(PACKAGE)]
    own += [p for p in _search_path() if Path(p).resolve() != PACKAGE.parent.resolve()]
    return sorted({*SYSTEM, *own})


def _search_path() -> list[str]:
    """Where Python looks for packages beside its own folders. A submission has another home, so
    what is installed for this user alone has to be named."""
    places = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    own = site.getusersitepackages()
    return [*places, own] if site.ENABLE_USER_SITE and os.path.isdir(own) else places


def _bubblewrap(folder: Path, readable: list[str], *, gpu: bool) -> list[str]:
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session"]
    words += ["--tmpfs", "/tmp"]  # first: Python, the package or the folder may lie in there
    for path in readable:
        if path not in ("/proc", "/dev"):
            words += ["--ro-bind-try", path, path]
    words += ["--proc", "/proc", "--dev", "/dev"]
    if gpu:
        for device in (*Path("/dev").glob("nvidia*"), Path("/dev/dri"), Path("/dev/kfd")):
            words += ["--dev-bind-try", str(device), str(device)]
    return [*words, "--bind", str(folder), str(folder), "--chdir", str(folder)]


def _resource_limits(limits: Limits, *, gpu: bool) -> dict[str, int]:
    values = {
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": 1024,
        # CUDA starts threads of its own, in every process of every worker.
        "RLIMIT_NPROC": _own_tasks() + (64 if gpu else 8) * limits.processes,
    }
    if not gpu:  # CUDA reserves address space by the terabyte
        values["RLIMIT_DATA"] = limits.memory
    return values


def _own_tasks() -> int:
    """Threads of this user, which the kernel counts against the same limit."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == os.getuid():
                count += sum(1 for _ in (entry / "task").iterdir())
    return count or 2048


def environment(folder: Path) -> dict[str, str]:
    """The environment of a submission: little of the grader's, and folders of its own."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    places = {
        "HOME": "home",
        "TMPDIR": "tmp",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "MPLCONFIGDIR": "home/matplotlib",
        "IPYTHONDIR": "home/ipython",
        "JUPYTER_RUNTIME_DIR": "home/runtime",
        "JUPYTER_CONFIG_DIR": "home/jupyter",
        "JUPYTER_DATA_DIR": "home/jupyter-data",
        "CUDA_CACHE_PATH": "home/cuda",
    }
    for name in places.values():
        (folder / name).mkdir(parents=True, exist_ok=True)
    return {
        **kept,
        **{name: str(folder / place) for name, place in places.items()},
        "PYTHONPATH": os.pathsep.join([*_search_path(), str(PACKAGE.parent)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "agg",
    }


# Watching and ending what was started ----------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """A process's children, and theirs, as far as the system lets us see (Linux)."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path("/proc", entry, "stat").read_text(errors="replace")
                fields = text.rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents.setdefault(int(fields[1]), []).append(int(entry))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def memory_of(pids: list[int]) -> int:
    """Bytes of their own that these processes hold in memory; what they share counts each time."""
    total = 0
    page = os.sysconf("SC_PAGE_SIZE")
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            _, resident, shared, *_ = Path("/proc", str(pid), "statm").read_text().split()
            total += (int(resident) - int(shared)) * page
    return total


@contextlib.contextmanager
def paused(process: subprocess.Popen) -> Iterator[None]:
    """Let a process and everything that came of it stand still meanwhile."""
    known: set[int] = set()
    while new := {process.pid, *descendants(process.pid)} - known:
        known |= new
        _signal(new, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(known, signal.SIGCONT)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_all(process: subprocess.Popen, patience: float = 10.0) -> None:
    """End a process that has a session of its own, and everything that came of it.

    What left the session is found as a descendant: it is stopped first, so that nothing new is
    started while the list is made.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        family = descendants(process.pid)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            _signal(family, number)
        if not family:
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)


def end_strays(kept: Iterable[int]) -> None:
    """End what came of this process, however it was left behind, but for some and what is theirs.

    A process that has adopted its orphans (:func:`flashcourse.grading.confine.adopt_orphans`) finds
    here those whose parent has ended, where no namespace of their own ends them.
    """
    spared = {pid for process in kept for pid in (process, *descendants(process))}
    for _ in range(20):  # one that is at it may start another meanwhile
        strays = [pid for pid in descendants(os.getpid()) if pid not in spared]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            _signal(strays, number)
        for pid in strays:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not strays:
            return
        time.sleep(0.01)
