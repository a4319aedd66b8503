"""Renders Jinja templates, escaping all values, with filters that format numbers, differences and events."""

from __future__ import annotations

import functools
import math
from datetime import datetime
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from tula_wire import Configuration, Estimate, Event
from tula_wire.format import NOTHING, configuration, count, duration, energy, mass, money, option, percent, size
from tula_wire.verdict import worth


def signed(share: float | None) -> str:
    """Return a fraction as a percentage with its sign."""
    return NOTHING if share is None else _minus(percent(share, signed=True))


def tone(error: float | None) -> str:
    """Return the CSS class for a relative error: good below 5 %, fair below 15 %, otherwise bad."""
    size = math.nan if error is None else abs(error)
    return "good" if size < 0.05 else "fair" if size < 0.15 else "bad" if math.isfinite(size) else ""


def tone_against(value: float, other: float) -> str:
    """Return the CSS class for a value compared with another value; a smaller value is better."""
    return "good" if value < 0.9995 * other else "bad" if value > 1.0005 * other else ""


def saving(share: float | None) -> str:
    """Return the time saved compared with another choice, in words; a much longer time is shown as a factor."""
    if share is None or not math.isfinite(share):
        return NOTHING
    if abs(share) < 0.005:
        return "the same"
    return (
        f"{share * 100:.0f} % less"
        if share > 0
        else f"{1 - share:.3g} × as long"
        if share < -0.5
        else f"{-share * 100:.0f} % more"
    )


def against(value: float, other: float) -> str:
    """Return the difference of `value` from `other` as a signed percentage, or as a factor if it is large."""
    if not (other > 0 and math.isfinite(value)):
        return NOTHING
    ratio = value / other
    if abs(ratio - 1) < 0.0005:
        return "same"
    return f"{ratio:.3g} ×" if ratio >= 2 else _minus(percent(ratio - 1, signed=True))


def _minus(number: str) -> str:
    """Return the number as text with a minus sign, since screen readers read a hyphen incorrectly."""
    return number.replace("-", "−")


def duration_interval(estimate: Estimate | None) -> str:
    """Return the 90 % interval of a duration as text."""
    return NOTHING if estimate is None else f"{duration(estimate.low)} to {duration(estimate.high)}"


def money_interval(estimate: Estimate | None) -> str:
    """Return the 90 % interval of a cost as text."""
    return NOTHING if estimate is None else f"{money(estimate.low)} to {money(estimate.high)}"


def moment(at: datetime | None) -> str:
    """Return a time in UTC, to the minute, as text; the page's script converts it to local time."""
    return NOTHING if at is None else at.strftime("%Y-%m-%d %H:%M UTC")


def words(name: str) -> str:
    """Return a name such as `out_of_memory` with spaces for underscores."""
    return name.replace("_", " ")


def event_warns(event: Event) -> bool:
    """Return True if the user may need to act on the event."""
    if event.kind == "drift":
        return event.data.get("alarm") != "recovered"
    if event.kind == "advice":
        return True
    return event.data.get("state") in ("failed", "out_of_memory")


def event_sentence(event: Event) -> str:
    """Return a sentence that describes an event of any kind except `samples`."""
    data: dict[str, Any] = event.data
    if isinstance(data.get("sentence"), str):
        return str(data["sentence"])
    if event.kind == "recommendation":
        chosen = data.get("configuration")
        name = configuration(Configuration.from_json(chosen)) if isinstance(chosen, dict) else "nothing"
        return f"Recommends {name} ({words(str(data.get('objective', '')))}, {data.get('basis', '')})."
    state = words(str(data.get("state", "changed")))
    noun = {"job": "Job", "run": "Run"}.get(event.kind, "Gradient scaling")
    why = next((data[name] for name in ("message", "plan_reason", "purpose", "reason") if data.get(name)), "")
    return f"{noun} {state}{f': {why}' if why else ''}"


_FILTERS: Final = (
    *(duration, money, size, count, energy, mass, configuration, option, signed, tone, tone_against, saving, against),
    *(duration_interval, money_interval, moment, words, event_warns, event_sentence, worth),
)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tula_service.dashboard", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {filter_.__name__: filter_ for filter_ in _FILTERS}
    environment.filters |= {"share": percent, "percent": functools.partial(percent, digits=0)}
    return environment


def render(name: str, **context: Any) -> str:
    """Return a rendered template. Raises jinja2.UndefinedError if the template uses a value that `context` lacks."""
    return _environment().get_template(name).render(**context)
