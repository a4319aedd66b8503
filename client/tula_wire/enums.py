"""The closed sets of words that service, agent and client share."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Objective: TypeAlias = Literal["balanced", "time", "cost", "knee", "time_to_quality", "energy"]
"""The objectives that a recommendation may optimize."""

Search: TypeAlias = Literal["full", "partial", "adaptive", "paper"]
"""The ways to profile a job's candidates."""

StepTimeForm: TypeAlias = Literal["overlap", "ring", "parameter_server"]
"""The equation that predicts step time: our own, with overlapping communication, or one of the paper's two."""

Basis: TypeAlias = Literal["prior", "transfer", "probed", "profiled"]
"""The possible bases of a prediction."""

RunKind: TypeAlias = Literal["profile", "train"]
"""The purposes of a run."""

RunOrigin: TypeAlias = Literal["plan", "user"]
"""Who asked for a run: the profiling plan, or the user."""

RunState: TypeAlias = Literal["pending", "claimed", "running", "succeeded", "out_of_memory", "failed", "cancelled"]
"""The states of a run: pending, claimed, running, then one of `FINAL_STATES`."""

FINAL_STATES: Final[frozenset[RunState]] = frozenset({"succeeded", "out_of_memory", "failed", "cancelled"})

EndCause: TypeAlias = Literal["vanished", "superseded", "no_samples", "time_limit"]
"""Why a run ended, if its state does not show it.

vanished: the lease of a training run expired. superseded: another run continued it before it reported its end.
no_samples: a profiling run reported success without a single sample. time_limit: `tula run` ended a training run that
had used up its deadline or budget.
"""
