"""The agent in the training process: it measures, sends in the background, and never raises into the job."""

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
    """Return the names that a script uses."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a name when a script first uses it, since most scripts need only a few names."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tula_agent' has no attribute {name!r}")
