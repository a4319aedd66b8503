"""Numbers and configurations as people read them, in the terminal, on pages and in sentences. Pure."""

from __future__ import annotations

import math
from typing import Final

from tula_wire.configurations import DEFAULT_INSTANCE_TYPE, Configuration

NOTHING: Final = "-"
"""What is not known."""

_STEPS: Final = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def duration(seconds: float | None) -> str:
    """Three figures, or two units from a minute on: `512 us`, `41.3 ms`, `2.05 s`, `3 min 20 s`, `5 h 12 min`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    for great, great_name, small, small_name in _STEPS:
        if seconds >= great:
            whole, rest = divmod(round(seconds / small) * small, great)
            return f"{whole:,.0f} {great_name}" + (f" {rest / small:.0f} {small_name}" if rest else "")
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:.3g} us"


def size(size_bytes: float | None) -> str:
    """Powers of 1024: `512 B`, `1.5 MiB`, `15.9 GiB`."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.3g} {unit}" if abs(size_bytes) < 999.5 else f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.1f} TiB"


def count(number: float) -> str:
    """Three figures: `950`, `32.8 k`, `2.1 M`."""
    for unit in ("", " k", " M", " G"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.3g} T"


def money(usd: float | None) -> str:
    """Dollars with cents below a thousand, and with three figures below one."""
    if usd is None or not math.isfinite(usd):
        return NOTHING
    return f"${usd:,.0f}" if abs(usd) >= 1000 else f"${usd:,.2f}" if abs(usd) >= 1 or usd == 0 else f"${usd:.3g}"


def percent(share: float | None, *, signed: bool = False, digits: int = 1) -> str:
    """A fraction as per cent."""
    if share is None or not math.isfinite(share):
        return NOTHING
    return f"{share * 100:{'+' if signed else ''}.{digits}f} %"


def cluster_name(value: Configuration) -> str:
    """The nodes: `4 nodes`, or `4 nodes of p3` where the instance types have names."""
    nodes = f"{value.num_nodes} node{'s' if value.num_nodes != 1 else ''}"
    return nodes if value.instance_type == DEFAULT_INSTANCE_TYPE else f"{nodes} of {value.instance_type}"


def configuration(value: Configuration | None) -> str:
    """Nodes and batch: `4 nodes of p3, global batch 256 (local 32 x 2 micro-steps)`."""
    if value is None:
        return NOTHING
    accumulation = f" x {value.grad_accum_steps} micro-steps" if value.grad_accum_steps != 1 else ""
    return (
        f"{cluster_name(value)}, global batch {value.global_batch_size} (local {value.local_batch_size}{accumulation})"
    )
