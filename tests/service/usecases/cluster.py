"""Simulates a cluster with a known step time, and calls the use cases as a launcher and an agent would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tula_wire as wire
from tests.service.store.examples import add_chunk
from tula_service.domain import NewChunk
from tula_service.store import Store
from tula_service.usecases import jobs, recommendations, runs
from tula_service.usecases.access import ANONYMOUS, KnownRuns, Principal
from tula_service.usecases.samples import SampleIngest

OPEN = frozenset({"pending", "claimed", "running"})


def spec(**changes: Any) -> wire.JobSpec:
    """Return a job of 100,000 examples on up to 8 nodes of 2 ranks, at 3 USD per node-hour."""
    body: dict[str, Any] = {
        "name": "job",
        "model": {"name": "net"},
        "dataset": {"size": 100_000},
        "epochs": 10,
        "cluster": {"max_nodes": 8, "ranks_per_node": 2, "price": {"usd_per_node_hour": 3.0}},
        "batch": {"max_local_batch_size": 256},
        "objective": "time",
    }
    return wire.JobSpec.model_validate(body | changes)


def overlapping(c: wire.Configuration, *, bandwidth: float = 1.0) -> float:
    """Return the step time in seconds: compute grows with the batch and hides communication over the links."""
    compute = 0.010 + 0.0005 * c.local_batch_size
    world = c.world_size
    ring = 0.06 * 2 * (world - 1) / world * (1.0 if c.num_nodes > 1 else 0.2) / bandwidth
    return float((compute**2.5 + ring**2.5) ** 0.4)


@dataclass
class Cluster:
    """Runs what the plan asks for; `noise` is the relative spread of step times, `capacity_bytes` a rank's memory."""

    store: Store
    step_time: Callable[[wire.Configuration], float] = overlapping
    noise: float = 0.02
    capacity_bytes: float | None = None
    bytes_per_sample: float = 30e6
    static_bytes: float = 1e9
    principal: Principal = ANONYMOUS
    ran: list[wire.Configuration] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(7)
        self.ingest = SampleIngest(self.store, KnownRuns(self.store))
        self.sequence = 0

    def register(self, wanted: wire.JobSpec | None = None, **options: Any) -> wire.JobCreated:
        """Register a job."""
        return jobs.register(self.store, self.principal, wanted or spec(), **options)

    def work(self, job_id: str, *, most: int = 100) -> list[wire.Run]:
        """Claim and finish runs until the plan has no more or `most` runs are finished."""
        done = []
        while len(done) < most:
            claimed = runs.claim(self.store, self.principal, job_id, wire.ClaimRequest(holder="launcher")).run
            if claimed is None:
                break
            done.append(self.execute(claimed))
        return done

    def execute(self, run: wire.Run, *, steps: int = 20) -> wire.Run:
        """Do what a launcher and an agent do with a claimed run."""
        self.ran.append(run.configuration)
        self.patch(run.id, "running")
        batch = run.configuration.local_batch_size
        peak = self.static_bytes + self.bytes_per_sample * batch
        if self.capacity_bytes is not None and peak > self.capacity_bytes:
            return self.patch(run.id, "out_of_memory", failed_local_batch_size=batch)
        self.send(run, self.times(run.configuration, steps), peak=peak)
        return self.patch(run.id, "succeeded")

    def times(self, configuration: wire.Configuration, steps: int) -> np.ndarray[Any, Any]:
        """Return step times as this cluster would measure them."""
        return self.step_time(configuration) * np.exp(self.noise * self.random.standard_normal(steps))

    def send(
        self, run: wire.Run, times: Sequence[float] | np.ndarray[Any, Any], *, peak: float | None = None, **more: Any
    ) -> wire.SamplesAccepted:
        """Send samples of rank 0."""
        count = len(times)
        first, self.sequence = self.sequence, self.sequence + count
        memory = None
        if peak is not None:
            capacity = None if self.capacity_bytes is None else int(self.capacity_bytes)
            memory = wire.MemoryBreakdown(method="cuda_allocator", peak_bytes=int(peak), capacity_bytes=capacity)
        body: dict[str, Any] = {
            "rank": 0,
            "boot_id": "boot",
            "sequence": list(range(first, first + count)),
            "step": list(range(first, first + count)),
            "step_time_s": [float(value) for value in times],
            "memory": memory,
        }
        return self.ingest.store(self.principal, run.id, wire.SampleBatch.model_validate(body | more))

    def report(self, run: wire.Run, *, first_step: int = 0, **columns: Sequence[float]) -> None:
        """Store telemetry of rank 0, with one value per step from `first_step` on."""
        values = np.array(list(columns.values()), np.float64)
        steps = np.arange(first_step, first_step + values.shape[1])
        with self.store.transaction() as tx:
            key, _, _ = tx.telemetry.run_key(run.id)
            assert add_chunk(tx, key, NewChunk(0, "boot", first_step, steps, list(columns), values))

    def patch(self, run_id: str, state: str, **more: Any) -> wire.Run:
        """Change a run's state as its holder."""
        request = wire.RunPatch.model_validate({"state": state, "holder": "launcher", **more})
        return runs.patch(self.store, self.principal, run_id, request)

    def train(self, job_id: str, configuration: wire.Configuration, *, continues: str | None = None) -> wire.Run:
        """Start a training run, which may continue another."""
        request = wire.RunCreate(kind="train", configuration=configuration, holder="launcher", continues=continues)
        run = runs.create(self.store, self.principal, job_id, request)
        return self.patch(run.id, "running")

    def recommendation(self, job_id: str, objective: str | None = None) -> wire.Recommendation:
        """Return the current recommendation of the service."""
        return wire.read(wire.Recommendation, recommendations.get(self.store, self.principal, job_id, objective))

    def job(self, job_id: str) -> wire.Job:
        """Return the job."""
        return jobs.get(self.store, self.principal, job_id)

    def events(self, job_id: str, kind: str) -> list[dict[str, Any]]:
        """Return the data of all events of this kind, oldest first."""
        with self.store.reading() as tx:
            return [event.data for event in tx.events.after(job_id, 0, limit=1000) if event.kind == kind]
