"""Sizes, colours, units and axis ticks of all charts; imports no drawing library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

Spec = dict[str, Any]
Row = dict[str, Any]

WIDTH: Final = 640
HEIGHT: Final = 340
FAINT: Final = "#7f8894"
PALETTE: Final = ("#0f83ad", "#d1670c", "#25935a", "#c4559c", "#8a7a10", "#7a72d8", "#cf4f4f", "#5b8a8f")
"""Luminance between 0.13 and 0.30: each holds 3:1 against the light and the dark page (WCAG 2.1, 1.4.11)."""

DASHES: Final = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (12, 4), (4, 2, 1, 2), (1, 3), (10, 2, 2, 2))
"""Lines differ in dash as well as in colour, for those who cannot tell the colours apart."""


@dataclass(frozen=True)
class Unit:
    """Divide a base quantity by `size` to get a number in `name`."""

    size: float
    name: str


_TIME: Final = (
    Unit(86_400, "days"), Unit(3_600, "hours"), Unit(60, "minutes"), Unit(1, "s"), Unit(1e-3, "ms"), Unit(1e-6, "µs"),
)  # fmt: skip
_BYTES: Final = (Unit(2**30, "GiB"), Unit(2**20, "MiB"), Unit(2**10, "KiB"), Unit(1, "bytes"))


def time_unit(seconds: Iterable[float]) -> Unit:
    """The unit in which the greatest of these durations is at least 2."""
    return _fitting(_TIME, seconds)


def bytes_unit(sizes: Iterable[float]) -> Unit:
    """The binary unit in which the greatest of these sizes is at least 2."""
    return _fitting(_BYTES, sizes)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two positive ends, three to nine of them where the range allows; none for a narrow one."""
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [float(f"{digit * 10.0**power:.6g}") for power in powers for digit in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 4:
            return found
    return found if len(found) == 3 else []


def _fitting(units: Sequence[Unit], values: Iterable[float]) -> Unit:
    greatest = max((value for value in values), default=0.0)
    return next(
        (unit for unit in units if greatest >= 2 * unit.size), units[-1] if greatest > 0 else Unit(1, units[3].name)
    )
