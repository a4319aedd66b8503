"""What every chart shares: palette, units, and the step from an Altair chart to a finished specification."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tula_service.dashboard.charts.grammar import alt

Spec = dict[str, Any]
Row = dict[str, Any]

F = TypeVar("F", bound=Callable[..., Any])
_ALTAIR: Final = threading.Lock()

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


def one_at_a_time(draw: F) -> F:
    """Serialise a function that builds charts.

    Altair's method syntax keeps the channel being written in a descriptor of the class (`_PropertySetter`), so two
    threads would write into each other's charts. Building is pure Python: under the GIL the lock costs nothing.
    """

    @functools.wraps(draw)
    def guarded(*given: Any, **named: Any) -> Any:
        with _ALTAIR:
            return draw(*given, **named)

    return guarded  # type: ignore[return-value]


def time_unit(seconds: Iterable[float]) -> Unit:
    """The unit in which the greatest of these durations is at least 2."""
    return _fitting(_TIME, seconds)


def bytes_unit(sizes: Iterable[float]) -> Unit:
    """The binary unit in which the greatest of these sizes is at least 2."""
    return _fitting(_BYTES, sizes)


def legend(names: Sequence[str]) -> alt.Legend:
    """A legend above the chart whose samples are lines, in as many columns as such names leave room for."""
    longest = max((len(name) for name in names), default=0)
    columns = max(1, min(6, 75 // (longest + 7)))
    return alt.Legend(
        title=None,
        orient="top",
        columns=columns,
        symbolType="stroke",
        symbolSize=400,
        symbolStrokeWidth=2.5,
        symbolOpacity=1,
    )


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two positive ends, three to nine of them where the range allows; none for a narrow one."""
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [float(f"{digit * 10.0**power:.6g}") for power in powers for digit in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 4:
            return found
    return []


def outlined(chart: alt.Chart, **mark: Any) -> list[alt.Chart]:
    """Text that stays readable across lines: behind it the same text, thick, in the colour of the ground."""
    return [chart.mark_text(style="halo", **mark), chart.mark_text(**mark)]


def finish(chart: alt.TopLevelMixin | Spec, title: str, subtitle: str, datasets: Mapping[str, Sequence[Row]]) -> Spec:
    """The chart, or what its `to_dict` said earlier, as a validated specification that carries its data.

    Altair validates the drawing once; rows are attached afterwards, since validating thousands of numbers against a
    JSON schema costs seconds and proves nothing. Raises altair's SchemaValidationError for what is no Vega-Lite.
    """
    spec: Spec = dict(chart) if isinstance(chart, dict) else chart.to_dict()
    spec["title"] = {"text": title, "subtitle": subtitle, "anchor": "start"}
    spec["description"] = f"{title}. {subtitle}".strip()
    spec["datasets"] = {name: list(rows) for name, rows in datasets.items()}
    spec["config"] = {
        "view": {"continuousWidth": WIDTH, "continuousHeight": HEIGHT, "stroke": None},
        # A flushed label stands beside its tick: at both ends of the axis, 32 would be read as 40.
        "axis": {"labelLimit": 260, "labelFlush": False},
        "style": {"halo": {"fill": "white", "stroke": "white", "strokeWidth": 4, "strokeJoin": "round"}},
    }
    return spec


def message(title: str, sentence: str) -> Spec:
    """A specification that says in words why there is nothing to draw."""
    chart = (
        alt.Chart(alt.NamedData("message"), width=WIDTH, height=120)
        .mark_text(fontSize=15, lineBreak="\n", color=FAINT)
        .encode(text="sentence:N")
    )
    spec = finish(chart, title, "", {"message": [{"sentence": sentence}]})
    spec["usermeta"] = {"empty": True, "message": sentence}
    return spec


def _fitting(units: Sequence[Unit], values: Iterable[float]) -> Unit:
    greatest = max((value for value in values), default=0.0)
    return next(
        (unit for unit in units if greatest >= 2 * unit.size), units[-1] if greatest > 0 else Unit(1, units[3].name)
    )
