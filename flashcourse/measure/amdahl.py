"""What a faster part makes of the whole.

Amdahl (1967), "Validity of the single processor approach to achieving large scale computing
capabilities", AFIPS Conference Proceedings 30.
"""

from __future__ import annotations

import math


def amdahl_speedup(share: float, factor: float) -> float:
    """How many times faster the whole becomes if a part of it does.

    Args:
        share: of the part in the whole's time, 0 to 1.
        factor: how many times faster the part becomes; ``math.inf`` gives the limit.

    Raises:
        ValueError: the share is not between 0 and 1, or the factor is not positive.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be between 0 and 1, got {share!r}")
    if not factor > 0:
        raise ValueError(f"factor must be positive, got {factor!r}")
    left = 1 - share + share / factor
    return 1 / left if left else math.inf


def share_of_part(whole: float, without: float) -> float:
    """The share of a part, from the time of the whole and of the whole without it.

    Noise can make the second a little longer than the first: the share is then 0.

    Raises:
        ValueError: a time is not positive.
    """
    if not (whole > 0 and without > 0):
        raise ValueError(f"times must be positive, got {whole!r} and {without!r}")
    return max(0.0, 1 - without / whole)
