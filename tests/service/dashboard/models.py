"""Creates wire models for chart tests: a job with a grid of candidates, runs and series."""

from __future__ import annotations

import math
from datetime import datetime, timezone

import tula_wire as wire
from tula_wire.jobs import ProfilingCost

__all__ = ["NOW", "candidate", "grid", "job", "ledger", "recommendation", "run", "series"]

NOW = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
GIB = 2**30


def candidate(nodes: int, local: int, *, priced: bool = True, **more: object) -> wire.Candidate:
    """Return a candidate with a step time of 20 ms + 2 ms per example + up to 60 ms of communication."""
    configuration = wire.Configuration(num_nodes=nodes, local_batch_size=local)
    compute, exchange = 0.02 + 0.002 * local, 0.06 * (1 - 1 / nodes)
    step = compute + exchange
    total = 10 * 50_000 / configuration.global_batch_size * step
    wide = 0.05 if local < 256 else 0.12
    memory = 2 * GIB + 0.03 * GIB * local
    fields: dict[str, object] = {
        "configuration": configuration,
        "global_batch_size": configuration.global_batch_size,
        "step_time_s": _around(step, wide),
        "epoch_time_s": _around(total / 10, wide),
        "total_time_s": _around(total, wide),
        "cost_usd": _around(total / 3600 * nodes * 3.06, wide) if priced else None,
        "memory_bytes": _around(memory, 0.08),
        "memory_fits": 0.99 if memory < 15 * GIB else 0.2,
        "terms": wire.Terms(compute_time_s=compute, exposed_comm_time_s=exchange),
        "profiled": (nodes, local) in {(2, 32), (8, 32), (2, 256), (8, 256)},
        "extrapolated": local > 256,
        "excluded_by": "it would not fit in memory." if memory > 16 * GIB else None,
    }
    return wire.Candidate.model_validate(fields | more)


def grid(*, priced: bool = True) -> list[wire.Candidate]:
    """Return candidates with 1 to 8 nodes and local batches of 32 to 512."""
    return [candidate(nodes, 2**power, priced=priced) for nodes in (1, 2, 4, 8) for power in range(5, 10)]


def recommendation(
    candidates: list[wire.Candidate] | None = None, *, knee: bool = True, basis: wire.Basis = "profiled"
) -> wire.Recommendation:
    """Return a recommendation that chooses the second fastest of these candidates."""
    found = grid() if candidates is None else candidates
    allowed = sorted((c for c in found if c.excluded_by is None), key=lambda c: c.total_time_s.value)
    cheap = sorted((c for c in allowed if c.cost_usd is not None), key=lambda c: c.cost_usd.value)  # type: ignore[union-attr]
    chosen = allowed[1] if len(allowed) > 1 else None
    return wire.Recommendation(
        id="rec_1",
        job_id="job_1",
        created_at=NOW,
        basis=basis,
        objective="knee",
        chosen=chosen,
        runner_up=allowed[2] if len(allowed) > 2 else None,
        least_time=allowed[0] if allowed else None,
        least_cost=cheap[0] if cheap else None,
        knee=wire.Knee(
            found=knee and chosen is not None,
            global_batch_size=900.0 if knee and chosen is not None else None,
            reason="found" if knee else "the curve is flat",
        ),
        why="Because.",
        candidates=found,
        frontier=[c.configuration for c in allowed[:4]],
        max_local_batch_size={"default": 448},
        options=effects() if found else [],
        model=wire.ModelReport(form="overlap", version="1", num_runs=4, num_samples=120),
    )


def effects() -> list[wire.OptionEffect]:
    """Return the effects of two option values: one was launched and halves the time; one is predicted to save 5 %."""
    half, little = ({"value": v, "low": v * 0.9, "high": v * 1.1} for v in (0.5, 0.95))
    bf16 = {"option": "precision", "value": "bf16", "base": "fp32", "launched": True, "recommended": True}
    on = {"option": "compile", "value": "on", "base": "off", "launched": False, "recommended": False, "most_gain": 0.1}
    rows = (bf16 | {"time": half, "cost": half, "memory": little}, on | {"time": little})
    return [wire.OptionEffect.model_validate({**row, "sentence": f"{row['option']} pays."}) for row in rows]


def job(*, plan: list[wire.Run] | None = None, **limits: object) -> wire.Job:
    """Return a job on up to 8 nodes with 16 GiB per rank."""
    spec = wire.JobSpec(
        name="resnet50-cifar",
        model=wire.ModelSpec(name="resnet50"),
        dataset=wire.DatasetSpec(size=50_000),
        epochs=10,
        cluster=[
            wire.ClusterSpec(max_nodes=8, memory_bytes_per_rank=16 * GIB, price=wire.Price(usd_per_node_hour=3.06))
        ],
        limits=wire.Limits.model_validate(limits),
    )
    return wire.Job(
        id="job_1",
        name=spec.name,
        model_name="resnet50",
        state="ready",
        objective="knee",
        created_at=NOW,
        runs_done=3,
        runs_planned=4,
        spec=spec,
        plan=plan if plan is not None else [run("run_1", local=512, state="out_of_memory"), run("run_2")],
        plan_reason="Four runs tell the rest.",
        profiling_cost=ProfilingCost(
            spent_gpu_seconds=0.0,
            spent_usd=None,
            launches_left=0,
            runs_left=0,
            left_s=0.0,
            left_gpu_seconds=0.0,
            left_usd=None,
            launches_at_most=0,
            at_most_s=0.0,
            at_most_usd=None,
        ),
    )


def run(run_id: str = "run_2", *, nodes: int = 2, local: int = 64, **more: object) -> wire.Run:
    """Return a finished run that took 5 % longer than predicted."""
    fields: dict[str, object] = {
        "id": run_id,
        "job_id": "job_1",
        "kind": "train",
        "state": "succeeded",
        "configuration": wire.Configuration(num_nodes=nodes, local_batch_size=local),
        "created_at": NOW,
        "step_time_s": 0.21,
        "predicted_step_time_s": 0.2,
    }
    return wire.Run.model_validate(fields | more)


def ledger() -> wire.Ledger:
    """Return a ledger with one prediction that held and one that did not."""
    entries = [
        wire.LedgerEntry(
            recommendation_id=f"rec_{place}",
            created_at=NOW,
            objective="knee",
            basis="profiled",
            configuration=wire.Configuration(num_nodes=4, local_batch_size=64),
            prices={},
            model_version="1",
            predicted_step_time_s=_around(0.2, 0.1),
            run_id=f"run_{place}0",
            measured_step_time_s=measured,
            error=measured / 0.2 - 1,
            within_interval=abs(measured / 0.2 - 1) < 0.1,
        )
        for place, measured in ((1, 0.205), (2, 0.26))
    ]
    return wire.Ledger(entries=entries)


def series(column: str, *, points: int = 200, total: int | None = None, level: float = 1.0) -> wire.TelemetrySeries:
    """Return a wave around `level` with one missing value."""
    values: list[float | None] = [level * (1 + 0.2 * math.sin(i / 9)) for i in range(points)]
    if points > 3:
        values[points // 2] = None
    total = points if total is None else total
    stride = max(1, total // max(1, points))
    return wire.TelemetrySeries(
        run_id="run_2",
        column=column,
        rank=0,
        steps=[i * stride for i in range(points)],
        values=values,
        total_points=total,
        downsampled=total > points,
        available=[column],
    )


def _around(value: float, share: float) -> wire.Estimate:
    return wire.Estimate(value=value, low=value * (1 - share), high=value * (1 + share))
