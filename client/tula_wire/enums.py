"""The closed sets of words of the contract, which service, agent and client share."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Objective: TypeAlias = Literal["balanced", "time", "cost", "knee", "time_to_quality", "energy"]
"""What a recommendation optimizes."""

Search: TypeAlias = Literal["full", "partial", "adaptive", "paper"]
"""How a job's candidates are profiled."""

StepTimeForm: TypeAlias = Literal["overlap", "ring", "parameter_server"]
"""Which equation predicts step time: our own, in which communication overlaps, or one of the paper's two."""

Basis: TypeAlias = Literal["prior", "transfer", "probed", "profiled"]
"""What a prediction rests on."""

RunKind: TypeAlias = Literal["profile", "train"]
"""Why a run exists."""

RunOrigin: TypeAlias = Literal["plan", "user"]
"""Who asked for a run: the profiling plan, or the user."""

RunState: TypeAlias = Literal["pending", "claimed", "running", "succeeded", "out_of_memory", "failed", "cancelled"]
"""Life of a run: pending, claimed, running, then one of `FINAL_STATES`."""

FINAL_STATES: Final[frozenset[RunState]] = frozenset({"succeeded", "out_of_memory", "failed", "cancelled"})

EndCause: TypeAlias = Literal["vanished", "superseded", "no_samples", "time_limit"]
"""Why a run ended, where its state does not say it.

vanished: the lease of a training expired. superseded: another training continued it before it reported its end.
no_samples: a profiling run reported success without a single sample. time_limit: `tula run` ended a training that had
used up its deadline or budget.
"""
