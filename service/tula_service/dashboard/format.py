"""Jinja templates with everything escaped, and the filters that show numbers as people read them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from tula_wire import DEFAULT_INSTANCE_TYPE, Configuration, Estimate

NOTHING = "–"
_STEPS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def duration(seconds: float | None) -> str:
    """Two units at most: "3 h 12 min", "420 ms"; a dash for what is not known."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    for great, great_name, small, small_name in _STEPS:
        if seconds >= great:
            whole, rest = divmod(round(seconds / small) * small, great)
            return f"{whole:,.0f} {great_name}" + (f" {rest / small:.0f} {small_name}" if rest else "")
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:.3g} µs"


def money(usd: float | None) -> str:
    """Dollars with cents below a thousand."""
    if usd is None or not math.isfinite(usd):
        return NOTHING
    return f"${usd:,.0f}" if abs(usd) >= 1000 else f"${usd:,.2f}" if abs(usd) >= 0.01 or usd == 0 else f"${usd:.2g}"


def size(size_bytes: float | None) -> str:
    """Binary units."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return NOTHING
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(size_bytes) >= 2**power:
            return f"{size_bytes / 2**power:.3g} {name}"
    return f"{size_bytes:.0f} bytes"


def count(number: float) -> str:
    """Three figures: "950", "32.8 k", "2.1 M"."""
    power = min(max(int(math.log10(max(number, 1.0)) // 3), 0), 4)
    return f"{number / 1000**power:,.3g}{('', ' k', ' M', ' G', ' T')[power]}"


def percent(share: float | None) -> str:
    """A fraction as a percentage."""
    return NOTHING if share is None or not math.isfinite(share) else f"{share * 100:.0f} %"


def share(fraction: float | None) -> str:
    """A fraction as a percentage to a tenth."""
    return NOTHING if fraction is None or not math.isfinite(fraction) else f"{fraction * 100:.1f} %"


def signed(share: float | None) -> str:
    """A fraction as a percentage with its sign."""
    return NOTHING if share is None or not math.isfinite(share) else _minus(f"{share * 100:+.1f} %")


def tone(error: float | None) -> str:
    """The class of a relative error by its size: good below 5 %, bad from 15 %."""
    size = math.nan if error is None else abs(error)
    return "good" if size < 0.05 else "fair" if size < 0.15 else "bad" if math.isfinite(size) else ""


def tone_against(value: float, other: float) -> str:
    """The class of what is the better the less of it, beside another."""
    return "good" if value < 0.9995 * other else "bad" if value > 1.0005 * other else ""


def saving(share: float | None) -> str:
    """The share of time saved against another choice, in words: below nothing it takes longer, by a factor."""
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
    """`value` beside `other`, as a signed percentage; a factor where that says more."""
    if not (other > 0 and math.isfinite(value)):
        return NOTHING
    ratio = value / other
    if abs(ratio - 1) < 0.0005:
        return "same"
    return f"{ratio:.3g} ×" if ratio >= 2 else _minus(f"{(ratio - 1) * 100:+.1f} %")


def _minus(number: str) -> str:
    """With a minus sign: as wide as the plus above and below it, and read out as what it is."""
    return number.replace("-", "−")


def _interval(estimate: Estimate | None, show: Callable[[float | None], str]) -> str:
    return NOTHING if estimate is None else f"{show(estimate.low)} to {show(estimate.high)}"


def duration_interval(estimate: Estimate | None) -> str:
    """The 90 % interval of a duration."""
    return _interval(estimate, duration)


def money_interval(estimate: Estimate | None) -> str:
    """The 90 % interval of a cost."""
    return _interval(estimate, money)


def moment(at: datetime | None) -> str:
    """A time stamp, in UTC, to the minute; the page's script makes it local."""
    return NOTHING if at is None else at.strftime("%Y-%m-%d %H:%M UTC")


def cluster(value: Configuration) -> str:
    """For example "4 nodes", or "4 x p3.2xlarge" where several instance types compete."""
    if value.instance_type != DEFAULT_INSTANCE_TYPE:
        return f"{value.num_nodes} × {value.instance_type}"
    return "1 node" if value.num_nodes == 1 else f"{value.num_nodes} nodes"


def configuration(value: Configuration | None) -> str:
    """Cluster, local batch and accumulation in one line."""
    if value is None:
        return NOTHING
    steps = f" × {value.grad_accum_steps} micro-steps" if value.grad_accum_steps > 1 else ""
    return f"{cluster(value)}, batch {value.global_batch_size} ({value.local_batch_size} a rank{steps})"


def words(name: str) -> str:
    """`out_of_memory` as people write it."""
    return name.replace("_", " ")


_FILTERS: Final[dict[str, Callable[..., str]]] = {
    "duration": duration,
    "money": money,
    "size": size,
    "count": count,
    "percent": percent,
    "share": share,
    "signed": signed,
    "tone": tone,
    "tone_against": tone_against,
    "saving": saving,
    "against": against,
    "duration_interval": duration_interval,
    "money_interval": money_interval,
    "moment": moment,
    "configuration": configuration,
    "words": words,
}


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tula_service.dashboard", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(_FILTERS)
    return environment


def render(name: str, **context: Any) -> str:
    """A page. Raises jinja2.UndefinedError when a template asks for what it was not given."""
    return _environment().get_template(name).render(**context)
