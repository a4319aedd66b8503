"""Tests that jobs and runs agree with a plain dictionary of states under any sequence of requests."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec
from tests.support.clock import ManualClock
from tula_service.errors import Conflict
from tula_service.store import Store
from tula_service.usecases import runs
from tula_service.usecases.access import ANONYMOUS

FINAL = ("succeeded", "out_of_memory", "failed", "cancelled")
LEASE_S = 60.0
HOLDERS = ("one", "two")


class Machine(RuleBasedStateMachine):
    """Simulates two launchers that work on one job in any order over time; `expected` has the state of each run."""

    claimed = Bundle("claimed")
    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tula-machine-"))
        database = str(self.folder / "tula.db")
        shutil.copy(Machine.template, database)
        self.clock = ManualClock()
        self.store = Store.open(database, now=self.clock)
        self.cluster = Cluster(self.store)
        wanted = spec(cluster={"max_nodes": 2}, batch={"max_local_batch_size": 64}, search="full")
        self.job_id = self.cluster.register(wanted).job.id
        self.expected: dict[str, tuple[str, str, float]] = {}
        self.finished: dict[str, str] = {}

    def teardown(self) -> None:
        """Close the store and remove its files."""
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(target=claimed, holder=st.sampled_from(HOLDERS))
    def claim(self, holder: str) -> str:
        request = wire.ClaimRequest(holder=holder, lease_s=LEASE_S)
        run = runs.claim(self.store, ANONYMOUS, self.job_id, request).run
        now = self.clock().timestamp()
        for known, (state, _, expires) in list(self.expected.items()):
            if expires < now and (run is None or known != run.id):
                assert state in ("claimed", "running")
                del self.expected[known]
        if run is None:
            return ""
        assert run.id not in self.finished
        held = self.expected.get(run.id)
        assert held is None or held[2] < now, "a run that somebody holds was given away"
        self.expected[run.id] = ("claimed", holder, now + LEASE_S)
        return run.id

    @precondition(lambda self: self.expected)
    @rule(run_id=claimed, holder=st.sampled_from(HOLDERS), state=st.sampled_from(("running", "pending", *FINAL)))
    def patch(self, run_id: str, holder: str, state: str) -> None:
        if run_id == "":
            return
        before = runs.get(self.store, ANONYMOUS, run_id)
        request = wire.RunPatch.model_validate({"state": state, "holder": holder})
        try:
            after = runs.patch(self.store, ANONYMOUS, run_id, request)
        except Conflict:
            held = self.expected.get(run_id)
            ended = self.finished.get(run_id)
            assert (ended is not None and ended != state) or held is None or held[1] != holder
            assert runs.get(self.store, ANONYMOUS, run_id) == before, "a refusal changed something"
            return
        if run_id in self.finished:
            assert after.state == self.finished[run_id]
        elif state in FINAL:
            # Without a sample a success is none; `sample` sends some.
            self.finished[run_id] = "failed" if state == "succeeded" and before.num_samples == 0 else state
            assert after.state == self.finished[run_id]
            self.expected.pop(run_id, None)
        elif state == "pending":
            assert after.state == "pending"
            self.expected.pop(run_id, None)
        else:
            self.expected[run_id] = (state, holder, self.clock().timestamp() + LEASE_S)

    @rule(run_id=claimed)
    def sample(self, run_id: str) -> None:
        if run_id == "":
            return
        before = runs.get(self.store, ANONYMOUS, run_id)
        self.cluster.send(before, [0.1, 0.1])
        assert runs.get(self.store, ANONYMOUS, run_id).num_samples == before.num_samples + 2
        if run_id in self.expected:
            state, holder, _ = self.expected[run_id]
            self.expected[run_id] = (state, holder, self.clock().timestamp() + LEASE_S)

    @rule(seconds=st.sampled_from((1.0, 30.0, 61.0)))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def every_run_is_what_the_dictionary_says(self) -> None:
        states = {run.id: run.state for run in runs.list_runs(self.store, ANONYMOUS, self.job_id).runs}
        for run_id, state in self.finished.items():
            assert states[run_id] == state
        for run_id, (state, _, _) in self.expected.items():
            assert states[run_id] == state
        job = self.cluster.job(self.job_id)
        done = sum(state in ("succeeded", "out_of_memory", "failed") for state in states.values())
        assert job.runs_done == done
        open_runs = [state for state in states.values() if state not in FINAL]
        assert job.state == ("planning" if open_runs else "ready")


@pytest.fixture(autouse=True)
def _template(sqlite_template: Path) -> None:
    Machine.template = sqlite_template


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=8,
    stateful_step_count=15,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a step costs a fit: shrinking would take minutes
    suppress_health_check=list(HealthCheck),
)
