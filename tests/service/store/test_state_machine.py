"""Tests that any sequence of operations leaves the store in the same state as a plain dictionary."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.service.store.examples import CONFIGURATION, a_job, samples
from tests.support.clock import ManualClock
from tula_service.domain import NewRun
from tula_service.errors import NotFound
from tula_service.perfmodel.step_summary import summarise
from tula_service.store import Store
from tula_wire.enums import FINAL_STATES, RunState

HELD = ("claimed", "running")
FINAL = sorted(FINAL_STATES)


@dataclass
class Expected:
    """A run as the dictionary records it."""

    job: str
    key: int
    state: RunState = "pending"
    holder: str | None = None
    expires: float | None = None
    num_samples: int = 0
    lease_s: float = 0.0


class JobsAndRuns(RuleBasedStateMachine):
    """Applies every operation to the store and to `self.expected`."""

    jobs = Bundle("jobs")
    runs = Bundle("runs")
    template: Path

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tula-machine-"))
        shutil.copy(self.template, self.folder / "tula.db")
        self.clock = ManualClock()
        self.elapsed = 0.0
        self.store = Store.open(str(self.folder / "tula.db"), now=self.clock)
        self.expected: dict[str, Expected] = {}
        self.alive: set[str] = set()
        self.versions: dict[str, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    @rule(target=jobs)
    def register(self) -> str:
        job = a_job(self.store)
        self.alive.add(job.id)
        self.versions[job.id] = 0
        return job.id

    @rule(target=runs, job=jobs)
    def plan(self, job: str) -> str:
        if job not in self.alive:
            with pytest.raises(NotFound):
                self._create(job)
            return "run-nowhere"
        run_id, key = self._create(job)
        self.expected[run_id] = Expected(job, key)
        return run_id

    def _create(self, job: str) -> tuple[str, int]:
        with self.store.transaction() as tx:
            run = tx.runs.create(job, NewRun("profile", CONFIGURATION))
        return run.id, run.key

    @rule(job=jobs, holder=st.sampled_from(["a", "b"]), lease_s=st.sampled_from([10.0, 60.0]))
    def claim(self, job: str, holder: str, lease_s: float) -> None:
        self._expire(job)
        free = [run for run, known in self.expected.items() if known.job == job and known.state == "pending"]
        with self.store.transaction() as tx:
            claimed = tx.leases.claim(job, holder=holder, lease_s=lease_s)
        if not free:
            assert claimed is None
            return
        first = min(free, key=lambda run: self.expected[run].key)
        assert claimed is not None
        assert claimed.id == first, "the plan's order is kept"
        known = self.expected[first]
        known.state, known.holder = "claimed", holder
        known.expires, known.lease_s = self.elapsed + lease_s, lease_s

    def _expire(self, job: str) -> None:
        for known in self.expected.values():
            late = known.expires is not None and known.expires < self.elapsed
            if known.job == job and known.state in HELD and late:
                known.state, known.holder, known.expires = "pending", None, None

    @rule(run=runs)
    def renew(self, run: str) -> None:
        known = self.expected.get(run)
        with self.store.transaction() as tx:
            renewed = tx.leases.renew(run)
        assert renewed == (known is not None and known.state in HELD)
        if known is not None and renewed and known.expires is not None:
            known.expires = self.elapsed + known.lease_s

    @rule(run=runs, expected=st.sampled_from(get_args(RunState)), to=st.sampled_from(["running", *FINAL]))
    def move(self, run: str, expected: RunState, to: RunState) -> None:
        known = self.expected.get(run)
        with self.store.transaction() as tx:
            moved = tx.runs.transition(run, expected=[expected], to=to)
        assert moved == (known is not None and known.state is expected)
        if known is not None and moved:
            known.state = to
            if to in FINAL_STATES:
                known.expires = None

    @rule(run=runs, count=st.integers(1, 30), boot=st.sampled_from(["x", "y"]))
    def measure(self, run: str, count: int, boot: str) -> None:
        known = self.expected.get(run)
        if known is None:
            return
        before = self._rows(known.key, boot)
        with self.store.transaction() as tx:
            stored = tx.samples.add(known.key, known.job, samples(count, boot_id=boot))
        assert stored == max(0, count - before)
        known.num_samples += stored

    def _rows(self, key: int, boot: str) -> int:
        with self.store.reading() as tx:
            counted = tx.connection.exec_driver_sql(
                "SELECT count(*) FROM step_samples s JOIN sample_sources o ON o.key = s.source_key "
                "WHERE o.run_key = ? AND o.boot_id = ?",
                (key, boot),
            ).scalar_one()
        return int(counted)

    @rule(seconds=st.sampled_from([5.0, 30.0, 90.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.elapsed += seconds

    @precondition(lambda self: len(self.alive) > 1)
    @rule(job=jobs)
    def delete(self, job: str) -> None:
        with self.store.transaction() as tx:
            tx.jobs.begin_delete(job)
            tx.jobs.delete(job)
        self.alive.discard(job)
        self.versions.pop(job, None)
        self.expected = {run: known for run, known in self.expected.items() if known.job != job}

    @invariant()
    def both_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        with self.store.reading() as tx:
            assert tx.jobs.list(limit=500).total == len(self.alive)
            for job in self.alive:
                found = {run.id: run for run in tx.runs.list(job)}
                wanted = {run: known for run, known in self.expected.items() if known.job == job}
                assert set(found) == set(wanted)
                for run, known in wanted.items():
                    assert (found[run].state, found[run].num_samples) == (known.state, known.num_samples)
                    if known.state in HELD:
                        assert found[run].holder == known.holder
                version = tx.jobs.data_version(job)
                assert version >= self.versions[job], "a data version never goes back"
                self.versions[job] = version
                for summary in tx.samples.summaries(job, summarise):
                    if not found[summary.run_id].num_samples:
                        assert summary.step_time_s is None  # out of memory before anything was measured
                        continue
                    assert summary.step_time_s is not None
                    assert np.isfinite(summary.step_time_s)


def test_the_store_agrees_with_a_dictionary(sqlite_template: Path) -> None:
    """Operations register, plan, claim, renew, move, measure, wait and delete in any order."""
    from hypothesis.stateful import run_state_machine_as_test

    JobsAndRuns.template = sqlite_template
    run_state_machine_as_test(
        JobsAndRuns,
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
