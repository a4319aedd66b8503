"""Defines the enumerations that service, agent and client share, as literal types."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Objective: TypeAlias = Literal["balanced", "time", "cost", "knee", "time_to_quality", "energy"]
"""The objectives that a recommendation can optimize."""

Search: TypeAlias = Literal["full", "partial", "adaptive", "paper"]
"""The strategies for choosing which candidates of a job to profile."""

StepTimeForm: TypeAlias = Literal["overlap", "ring", "parameter_server"]
"""The equation that predicts step time: our own, in which communication overlaps compute, or one of the paper's two."""

Basis: TypeAlias = Literal["prior", "transfer", "probed", "profiled"]
"""The kinds of data on which a prediction can be based."""

RunKind: TypeAlias = Literal["profile", "train"]
"""The purposes of a run."""

RunOrigin: TypeAlias = Literal["plan", "user"]
"""The origin of a run, which is either the profiling plan or the user."""

RunState: TypeAlias = Literal["pending", "claimed", "running", "succeeded", "out_of_memory", "failed", "cancelled"]
"""The states of a run, which is pending, then claimed, then running, and ends in one of `FINAL_STATES`."""

FINAL_STATES: Final[frozenset[RunState]] = frozenset({"succeeded", "out_of_memory", "failed", "cancelled"})

EndCause: TypeAlias = Literal["vanished", "superseded", "no_samples", "time_limit"]
"""The reason why a run ended, if its state does not show the reason.

vanished: the lease of a training run expired. superseded: another run continued the training run before the end of the
latter was reported. no_samples: a profiling run reported success without any sample. time_limit: `tula run` stopped a
training run that had used up its deadline or budget.
"""
