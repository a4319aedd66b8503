"""Formats numbers and configurations for people, in the terminal, on web pages and in sentences."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Final

from tula_wire.configurations import DEFAULT_INSTANCE_TYPE, Configuration

NOTHING: Final = "-"
"""The text for an unknown value."""

_STEPS: Final = (
    (60, "min", 1, "s", 3_600),
    (3_600, "h", 60, "min", 86_400),
    (86_400, "d", 3_600, "h", math.inf),
)
"""Each row has two units with their lengths in seconds, and the duration from which the next row is used."""


def duration(seconds: float | None) -> str:
    """Format a duration with three significant figures, or with two units if it is at least a minute.

    For example: `512 us`, `41.3 ms`, `2.05 s`, `3 min 20 s`, `5 h 12 min`.
    """
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if _figures(seconds) < 60:
        if _figures(seconds) >= 1:
            return f"{_figures(seconds):f} s"
        milliseconds = _figures(seconds * 1e3)
        return f"{milliseconds:f} ms" if milliseconds >= 1 or not seconds else f"{_figures(seconds * 1e6):f} us"
    text = ""
    for great, great_name, small, small_name, end in _STEPS:
        whole, rest = divmod(round(seconds / small) * small, great)
        text = f"{whole:,.0f} {great_name}" + (f" {rest / small:.0f} {small_name}" if rest else "")
        if whole * great + rest < end:
            break
    return text


def size(size_bytes: float | None) -> str:
    """Format a number of bytes in binary units, such as `512 B`, `1.5 MiB` or `15.9 GiB`."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(round(size_bytes)) < 1024:
            return f"{size_bytes:.3g} {unit}" if abs(size_bytes) < 999.5 else f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.1f} TiB"


def count(number: float) -> str:
    """Format a count with three significant figures, such as `950`, `32.8 k` or `2.1 M`."""
    if not math.isfinite(number):
        return NOTHING
    if number < 0:
        return f"-{count(-number)}"
    for unit in ("", " k", " M", " G"):
        if _figures(number) < 1000:
            return f"{_figures(number):f}{unit}"
        number /= 1000
    return f"{_figures(number):,f} T"


def multiple(ratio: float) -> str:
    """Format a factor with two significant figures, or as a whole number if it is at least ten: `0.5`, `16`, `120`."""
    return f"{_figures(ratio, 2):f}" if abs(ratio) < 9.95 else f"{ratio:,.0f}"


def money(usd: float | None) -> str:
    """Format US dollars with three significant figures below one, with cents below a thousand, else as an integer."""
    if usd is None or not math.isfinite(usd):
        return NOTHING
    if usd < 0:
        return f"-{money(-usd)}"
    if round(usd, 2) >= 1000:
        return f"${usd:,.0f}"
    return f"${_figures(usd):f}" if 0 < _figures(usd) < 1 else f"${usd + 0.0:.2f}"


def energy(kwh: float | None) -> str:
    """Format an energy with up to three significant figures, such as `950 Wh`, `12.3 kWh` or `1.2 MWh`."""
    return NOTHING if kwh is None else _in_unit(1e3 * kwh, "Wh")


def mass(grams: float | None) -> str:
    """Format a mass with up to three significant figures, such as `492 g`, `4.92 kg` or `1.3 t`."""
    if grams is None:
        return NOTHING
    return _in_unit(grams, "g") if grams < 999_500 else _in_unit(grams / 1e6, "t")


def percent(share: float | None, *, signed: bool = False, digits: int = 1) -> str:
    """Format a fraction as a percentage."""
    if share is None or not math.isfinite(share):
        return NOTHING
    rounded = round(share * 100, digits) + 0.0  # never -0
    return f"{rounded:{'+' if signed else ''}.{digits}f} %"


def _in_unit(number: float, unit: str) -> str:
    text = count(number)
    return f"{text}{unit}" if text[-1].isalpha() else f"{text} {unit}"


def _figures(number: float, figures: int = 3) -> Decimal:
    """Return `number` rounded to `figures` significant figures, as a Decimal, which `f` formats without an exponent."""
    return Decimal(f"{number + 0.0:.{figures}g}")


def cluster_name(value: Configuration) -> str:
    """Return text such as `4 nodes`, or `4 nodes of p3` if the instance type has a name."""
    nodes = f"{value.num_nodes} node{'s' if value.num_nodes != 1 else ''}"
    return nodes if value.instance_type == DEFAULT_INSTANCE_TYPE else f"{nodes} of {value.instance_type}"


_OPTIONS: Final = {
    ("compile", "on"): "compiled",
    ("compile", "off"): "not compiled",
    ("checkpointing", "on"): "checkpointing",
    ("checkpointing", "off"): "no checkpointing",
}
"""Short names for some option values."""


def option(name: str, word: str) -> str:
    """Return text for an option's value, such as `bf16` or `8 workers`, including the option's name if needed."""
    if name == "precision":
        return word
    if name == "num_workers":
        return f"{word} worker{'s' if word != '1' else ''}"
    return _OPTIONS.get((name, word), f"{name} {word}")


def configuration(value: Configuration | None) -> str:
    """Return text that describes the nodes, batch and options of a configuration.

    For example: `4 nodes of p3, global batch 256 (local 32 x 2 micro-steps), bf16, compiled`.
    """
    if value is None:
        return NOTHING
    accumulation = f" x {value.grad_accum_steps} micro-steps" if value.grad_accum_steps != 1 else ""
    return ", ".join(
        [
            cluster_name(value),
            f"global batch {value.global_batch_size} (local {value.local_batch_size}{accumulation})",
            *(option(name, word) for name, word in value.options),
        ]
    )
