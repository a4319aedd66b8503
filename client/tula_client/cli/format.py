"""Predictions, savings and table cells for the terminal. Pure."""

from __future__ import annotations

from tula_wire import Configuration, Estimate
from tula_wire.format import NOTHING, count, duration, money, size
from tula_wire.jobs import ProfilingCost

BRIEF = "nodes, batch (local)"
"""Heading of a column of `brief` configurations."""


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
        return NOTHING
    show = {"s": duration, "usd": money, "bytes": size, "count": count}[unit]
    return f"{show(value.value)} ({show(value.low)} to {show(value.high)})"


def brief(value: Configuration | None) -> str:
    """A configuration for a table cell, short enough for one line."""
    if value is None:
        return NOTHING
    kind = f" {value.instance_type}" if value.instance_type != "default" else ""
    nodes = f"{value.num_nodes}{kind}" + (f" x {value.ranks_per_node} ranks" if value.ranks_per_node != 1 else "")
    accumulation = f" x {value.grad_accum_steps}" if value.grad_accum_steps != 1 else ""
    return f"{nodes}, {value.global_batch_size} ({value.local_batch_size}{accumulation})"


def rest_of_plan(cost: ProfilingCost) -> str:
    """What is left of a plan: `2 launches of 8 runs, about 3 min 20 s and $0.21`; without prices no money."""
    launches = f"{cost.launches_left} launch{'es' if cost.launches_left > 1 else ''}"
    runs = f" of {cost.runs_left} runs" if cost.runs_left > cost.launches_left else ""
    usd = "" if cost.left_usd is None else f" and {money(cost.left_usd)}"
    return f"{launches}{runs}, about {duration(cost.left_s)}{usd}"
