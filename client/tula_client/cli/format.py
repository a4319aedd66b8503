"""Formats numbers and configurations for the terminal. Pure."""

from __future__ import annotations

from tula_wire import Configuration, Estimate
from tula_wire.jobs import ProfilingCost

BRIEF = "nodes, batch (local)"
"""Heading of a column of `brief` configurations."""


def seconds(value: float | None) -> str:
    """A duration with three figures: `512 us`, `41.3 ms`, `2.05 s`, `3 min 20 s`, `5 h 12 min`, `2.4 d`."""
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.3g} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    if value < 3600:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s"
    if value < 48 * 3600:
        hours, rest = divmod(round(value / 60), 60)
        return f"{hours} h {rest} min"
    return f"{value / 86_400:.1f} d"


def bytes_(value: float | None) -> str:
    """A size in powers of 1024: `512 B`, `1.5 MiB`, `15.9 GiB`."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def count(value: float) -> str:
    """A number of three figures: `950`, `32.8 k`, `2.1 M`."""
    for unit in ("", " k", " M", " G"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:,.3g} T"


def dollars(value: float | None) -> str:
    """A price, with enough decimal places that a small one is not printed as zero."""
    if value is None:
        return "-"
    return f"${value:,.2f}" if value >= 1 or value == 0 else f"${value:.3g}" if value >= 1e-4 else f"${value:.1e}"


def percent(value: float | None, *, signed: bool = False) -> str:
    """A fraction as per cent."""
    if value is None:
        return "-"
    return f"{value * 100:+.1f} %" if signed else f"{value * 100:.1f} %"


def saving(value: float) -> str:
    """A saved share of time in words; a negative share means a longer time."""
    if abs(value) < 0.005:
        return "the same time as"
    if value > 0:
        return f"{value * 100:.0f} % less time than"
    return f"{1 - value:.3g} times as long as"


def estimate(value: Estimate | None, unit: str = "s") -> str:
    """A prediction with its interval."""
    if value is None:
        return "-"
    show = {"s": seconds, "usd": dollars, "bytes": bytes_, "count": count}[unit]
    return f"{show(value.value)} ({show(value.low)} to {show(value.high)})"


def configuration(value: Configuration | None) -> str:
    """A configuration in a few words."""
    if value is None:
        return "-"
    nodes = f"{value.num_nodes} node" + ("s" if value.num_nodes != 1 else "")
    ranks = f" x {value.ranks_per_node} ranks" if value.ranks_per_node != 1 else ""
    accumulation = f" x {value.grad_accum_steps} micro-steps" if value.grad_accum_steps != 1 else ""
    kind = f" on {value.instance_type}" if value.instance_type != "default" else ""
    batch = f"global batch {value.global_batch_size} (local {value.local_batch_size}{accumulation})"
    return f"{nodes}{ranks}{kind}, {batch}"


def brief(value: Configuration | None) -> str:
    """A configuration for a table cell, short enough for one line."""
    if value is None:
        return "-"
    kind = f" {value.instance_type}" if value.instance_type != "default" else ""
    nodes = f"{value.num_nodes}{kind}" + (f" x {value.ranks_per_node} ranks" if value.ranks_per_node != 1 else "")
    accumulation = f" x {value.grad_accum_steps}" if value.grad_accum_steps != 1 else ""
    return f"{nodes}, {value.global_batch_size} ({value.local_batch_size}{accumulation})"


def rest_of_plan(cost: ProfilingCost) -> str:
    """What is left of a plan: `2 launches of 8 runs, about 3 min 20 s and $0.21`; without prices no money."""
    launches = f"{cost.launches_left} launch{'es' if cost.launches_left > 1 else ''}"
    runs = f" of {cost.runs_left} runs" if cost.runs_left > cost.launches_left else ""
    usd = "" if cost.left_usd is None else f" and {dollars(cost.left_usd)}"
    return f"{launches}{runs}, about {seconds(cost.left_s)}{usd}"
