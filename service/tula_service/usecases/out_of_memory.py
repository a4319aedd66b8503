"""Runs that ran out of memory: which of them bound the batch, and which are against what others measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tula_service.domain import RunState
from tula_service.store import RunSummary
from tula_wire import Configuration

__all__ = ["Contradiction", "Failures", "batch_of", "failures_of", "named"]


@dataclass(frozen=True)
class Contradiction:
    """A run that ran out of memory at a smaller batch than `fitted` measured on the same instance type."""

    failed: RunSummary
    fitted: Configuration
    fitted_run_id: str

    @property
    def sentence(self) -> str:
        """Both runs, what follows, and the remedy."""
        return (
            f"Memory: {named(self.failed)} ran out of memory, but {_named(self.fitted_run_id, self.fitted)} fitted on "
            "the same instance type, so only the failed configuration itself is left out: check that no other process "
            "uses the device, and register the job again to retry it."
        )


@dataclass(frozen=True)
class Failures:
    """`standing` rule out their batch and all above it; `contradicted` say nothing about other configurations."""

    standing: tuple[RunSummary, ...] = ()
    contradicted: tuple[Contradiction, ...] = ()


def failures_of(rows: Sequence[tuple[Configuration, RunSummary]], summaries: Sequence[RunSummary]) -> Failures:
    """Weigh every out-of-memory against the larger batches that were measured on the same instance type.

    A batch that ran out of memory itself, or lies above one that stands, is no witness: that it once fitted proves
    little.
    """
    standing: list[RunSummary] = []
    contradicted: list[Contradiction] = []
    bound: dict[str, float] = {}
    failed = [summary for summary in summaries if summary.state is RunState.OUT_OF_MEMORY]
    for summary in sorted(failed, key=batch_of, reverse=True):
        name, batch = summary.configuration.instance_type, batch_of(summary)
        witnesses = [
            (c, s.run_id)
            for c, s in rows
            if c.instance_type == name and batch < c.local_batch_size < bound.get(name, math.inf)
        ]
        if witnesses:
            contradicted.append(Contradiction(summary, *max(witnesses, key=lambda each: each[0].local_batch_size)))
        else:
            standing.append(summary)
            bound[name] = batch
    return Failures(tuple(standing), tuple(contradicted))


def batch_of(failed: RunSummary) -> int:
    """The local batch that did not fit."""
    return failed.failed_local_batch_size or failed.configuration.local_batch_size


def named(failed: RunSummary) -> str:
    """A run that ran out of memory, with its configuration."""
    return _named(failed.run_id, failed.configuration, batch_of(failed))


def _named(run_id: str, c: Configuration, batch: int | None = None) -> str:
    nodes = f"{c.num_nodes} node{'s' if c.num_nodes != 1 else ''}"
    kind = "" if c.instance_type == "default" else f" of {c.instance_type}"
    return f"run {run_id} ({nodes}{kind}, local batch {batch or c.local_batch_size})"
