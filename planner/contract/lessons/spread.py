"""How far a run may be from what a profile says of each figure: the share within which nine of ten runs are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, stdev

from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.lessons.corrections import paths

USUAL: dict[Figure, float] = {
    Figure.ssd: 0.25,
    Figure.h2d: 0.05,
    Figure.d2h: 0.05,
    Figure.dram_copy: 0.25,
    Figure.page_lock: 0.25,
    Figure.weights: 0.10,
    Figure.products: 0.15,
}
"""Of figures that a probe or one or two runs measured, from the pairs of predicted and measured in docs/log.md and bench/results. SSD:
0.878 to 1.209 on an H200, up to 1.28 on 2 cores. H2D: 0.993 to 1.004; D2H is taken as the same link. Weights: 0.992 to 0.994 on cards,
0.92 and 0.94 on the CPU. Products: 0.984 and 0.997 on cards, 1.05 and 1.10 on the CPU, 0.85 in many chunks. DRAM copies and page-locking
have no pairs: taken as for the SSD."""
UNSEEN = 0.5
"""Of figures that nobody measured: those of a datasheet, or derived. There are no pairs for them; half as much again is an assumption."""
BUSY = ", busy"
"""In the origin of what a probe measured while others used the machine: as good as a guess."""
LEAST = 0.02
"""However well runs agree, there is always another load on the machine."""
SEVERAL = 3
"""From so many runs on their own spread is taken."""
_T90 = (2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
"""Student's t for nine of ten, two-sided, of 2, 3, ... degrees of freedom; 1.8 beyond."""


def spread(hardware: HardwareProfile, figure: Figure) -> float:
    """Of ``figure`` on this machine: as its runs taught, else as is usual for where it comes from."""
    if figure in hardware.spread:
        return hardware.spread[figure]
    origin = _origin(hardware, figure)
    return UNSEEN if origin.startswith(("datasheet", "derived")) or BUSY in origin else USUAL[figure]


def is_measured(hardware: HardwareProfile, figure: Figure) -> bool:
    """Whether a probe measured what the profile says of ``figure``."""
    return _origin(hardware, figure).startswith("measured")


def _origin(hardware: HardwareProfile, figure: Figure) -> str:
    path = paths(figure, hardware.gpu is not None)[0]
    covering = [key for key in hardware.origin if f"{path}.".startswith(f"{key}.")]
    return hardware.origin[max(covering, key=len)] if covering else ""


def spread_of_runs(figure: Figure, logs: Sequence[float], probed: bool = False) -> float:
    """How far the next run may be from the middle of several, from the logarithms of what they found of ``figure`` (0 is the profile). One
    or two runs may be exceptions: their spread is at least the usual one, and at least their distance from what was ``probed``."""
    n = len(logs)
    if n < SEVERAL:
        known = (*logs, 0.0) if probed else logs
        return max(USUAL[figure], math.expm1(max(abs(x - median(logs)) for x in known)))
    t = _T90[n - SEVERAL] if n - SEVERAL < len(_T90) else 1.8
    return max(LEAST, math.expm1(t * stdev(logs) * math.sqrt(1 + 1 / n)))
