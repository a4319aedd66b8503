"""Measures a training process and sends the measurements in the background.

A failed measurement never raises an exception in the script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tula_agent.run import Run, init

if TYPE_CHECKING:
    from tula_agent.measure.estimate import MemoryEstimate, estimate_memory
    from tula_agent.scaling import TulaOptimizer

__all__ = [
    "MemoryEstimate",
    "Run",
    "TulaOptimizer",
    "estimate_memory",
    "init",
]

_LAZY = {
    "MemoryEstimate": "tula_agent.measure.estimate",
    "estimate_memory": "tula_agent.measure.estimate",
    "TulaOptimizer": "tula_agent.scaling",
}


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import and return a public name when it is first used, since most scripts need only a few of these names."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tula_agent' has no attribute {name!r}")
