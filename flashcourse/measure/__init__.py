"""Costs: time, peak memory, bytes moved (formula, meter, hardware counter), and the roofline."""

from flashcourse.measure.backend import Backend, which_backend
from flashcourse.measure.ceilings import Ceilings, measured_ceilings
from flashcourse.measure.counters import HardwareBytes, committed_measurement, hardware_bytes
from flashcourse.measure.hbm import HBM, Array
from flashcourse.measure.memory import (
    CandidateFailed,
    OutOfMemory,
    PeakMemory,
    peak_memory,
    readable_bytes,
)
from flashcourse.measure.metered import metered_flash, metered_naive
from flashcourse.measure.onchip import NotOnChip, SramExceeded
from flashcourse.measure.roofline import (
    CHIPS,
    Chip,
    arithmetic_intensity,
    attainable_flops,
    io_bound,
    ridge_point,
    roofline_seconds,
)
from flashcourse.measure.timing import Timing, time_ms
from flashcourse.measure.traffic import (
    AttentionTraffic,
    attention_flops,
    attention_traffic,
    visible_pairs,
)
from flashcourse.measure.why_not import Verdict, WhyNot, why_not

__all__ = [
    "CHIPS",
    "HBM",
    "Array",
    "AttentionTraffic",
    "Backend",
    "CandidateFailed",
    "Ceilings",
    "Chip",
    "HardwareBytes",
    "NotOnChip",
    "OutOfMemory",
    "PeakMemory",
    "SramExceeded",
    "Timing",
    "Verdict",
    "WhyNot",
    "arithmetic_intensity",
    "attainable_flops",
    "attention_flops",
    "attention_traffic",
    "committed_measurement",
    "hardware_bytes",
    "io_bound",
    "measured_ceilings",
    "metered_flash",
    "metered_naive",
    "peak_memory",
    "readable_bytes",
    "ridge_point",
    "roofline_seconds",
    "time_ms",
    "visible_pairs",
    "which_backend",
    "why_not",
]
