"""Answers as flat rows (dictionaries) for data frames and CSV files. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal

from tula_wire import Candidate, Configuration, Estimate, Ledger, Recommendation, Run

Cell = str | int | float | bool | None
Row = dict[str, Cell]
Table = Literal["candidates", "runs", "ledger"]

TABLES: Final[tuple[Table, ...]] = ("candidates", "runs", "ledger")


def candidate_rows(recommendation: Recommendation) -> list[Row]:
    """Every candidate with its predictions, their intervals as `_low` and `_high`, and its role in the answer."""
    return [_candidate(candidate, recommendation) for candidate in recommendation.candidates]


def run_rows(runs: Iterable[Run]) -> list[Row]:
    """Every run with its configuration and measurements."""
    return [
        {
            "run_id": run.id,
            "kind": run.kind,
            "state": run.state,
            **_configuration(run.configuration),
            "step_time_s": run.step_time_s,
            "predicted_step_time_s": run.predicted_step_time_s,
            "num_samples": run.num_samples,
            "dropped": run.dropped,
            "method": run.method,
            "purpose": run.purpose,
            "message": run.message,
            "created_at": run.created_at.isoformat(),
            "started_at": run.started_at.isoformat() if run.started_at else None,
            "finished_at": run.finished_at.isoformat() if run.finished_at else None,
        }
        for run in runs
    ]


def ledger_rows(ledger: Ledger) -> list[Row]:
    """Every past recommendation with the measurement that followed."""
    return [
        {
            "recommendation_id": entry.recommendation_id,
            "created_at": entry.created_at.isoformat(),
            "objective": entry.objective,
            "basis": entry.basis,
            **(_configuration(entry.configuration) if entry.configuration else {}),
            **dict(_estimate("predicted_step_time_s", entry.predicted_step_time_s)),
            **dict(_estimate("predicted_cost_usd", entry.predicted_cost_usd)),
            "measured_step_time_s": entry.measured_step_time_s,
            "error": entry.error,
            "within_interval": entry.within_interval,
            "run_id": entry.run_id,
        }
        for entry in ledger.entries
    ]


def roles(candidate: Candidate, recommendation: Recommendation) -> dict[str, bool]:
    """The role of a candidate in the answer."""

    def is_same(other: Candidate | None) -> bool:
        return other is not None and (other.configuration, other.spot) == (candidate.configuration, candidate.spot)

    return {
        "chosen": is_same(recommendation.chosen),
        "least_time": is_same(recommendation.least_time),
        "least_cost": is_same(recommendation.least_cost),
        "knee": recommendation.knee.found and recommendation.knee.configuration == candidate.configuration,
    }


def _candidate(candidate: Candidate, recommendation: Recommendation) -> Row:
    row = _configuration(candidate.configuration)
    for name in (
        "step_time_s",
        "epoch_time_s",
        "total_time_s",
        "cost_usd",
        "tokens_per_s",
        "usd_per_million_tokens",
        "memory_bytes",
    ):
        row.update(_estimate(name, getattr(candidate, name)))
    terms = candidate.terms
    return row | {
        "tokens_per_step": candidate.tokens_per_step,
        "memory_fits": candidate.memory_fits,
        "compute_time_s": terms.compute_time_s if terms else None,
        "exposed_comm_time_s": terms.exposed_comm_time_s if terms else None,
        "measured_step_time_s": candidate.measured_step_time_s,
        "statistical_efficiency": candidate.statistical_efficiency,
        "spot": candidate.spot,
        "profiled": candidate.profiled,
        "extrapolated": candidate.extrapolated,
        "dominated": candidate.dominated,
        "excluded_by": candidate.excluded_by,
        **roles(candidate, recommendation),
    }


def _configuration(configuration: Configuration) -> Row:
    return {
        "instance_type": configuration.instance_type,
        "num_nodes": configuration.num_nodes,
        "ranks_per_node": configuration.ranks_per_node,
        "world_size": configuration.world_size,
        "local_batch_size": configuration.local_batch_size,
        "grad_accum_steps": configuration.grad_accum_steps,
        "global_batch_size": configuration.global_batch_size,
    }


def _estimate(name: str, estimate: Estimate | None) -> Iterator[tuple[str, Cell]]:
    yield name, estimate.value if estimate else None
    yield f"{name}_low", estimate.low if estimate else None
    yield f"{name}_high", estimate.high if estimate else None
