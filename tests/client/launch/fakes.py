"""Provides a service with a plan in memory, commands with predetermined results, and a clock that jumps."""
# ruff: noqa: ARG002 (fakes take what the real ones take)

from __future__ import annotations

from datetime import datetime, timezone

from tula_client import ConflictError, InvalidInputError, ServiceUnreachableError
from tula_client.launch.run_loop import Runner
from tula_client.launch.template import Template
from tula_client.launch.workdir import WorkDir
from tula_wire import (
    Candidate,
    Configuration,
    Estimate,
    Instruction,
    Job,
    JobSpec,
    Knee,
    ModelReport,
    Problem,
    ProblemType,
    Recommendation,
    Run,
    RunClaimed,
    Token,
    TokenCreated,
)
from tula_wire.jobs import ProfilingCost

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
TEMPLATE = Template(("launch", "{world_size}", "{local_batch_size}", "{grad_accum_steps}"))
NO_COST = ProfilingCost(
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
)
FINAL = ("succeeded", "failed", "out_of_memory", "cancelled")


def spec(max_nodes=4, share_launches=False, on_breach="warn", options=None):
    return JobSpec.model_validate(
        {
            "name": "j",
            "model": {"name": "m"},
            "dataset": {"size": 100},
            "cluster": {"max_nodes": max_nodes},
            "batch": {"min_local_batch_size": 8, "max_grad_accum_steps": 2},
            "limits": {"on_breach": on_breach},
            "profiling": {"share_launches": share_launches},
            "options": options or {},
        }
    )


class FakeService:
    """A service that enforces the rules for leases and final states, and that can be unavailable."""

    url = "http://x"

    def __init__(self, configurations=(), chosen=None, options=None):
        self.options = options
        self.runs, self.away, self.calls, self.candidates, self.output = {}, 0, [], [], {}
        self.chosen, self.holders, self.continued = chosen, {}, []
        self.basis, self.share_launches, self.time_limit_s = "profiled", False, None
        for configuration in configurations:
            self.add("profile", configuration)

    def add(self, kind, configuration, state="pending"):
        run = Run(
            id=f"r{len(self.runs)}",
            job_id="job-1",
            kind=kind,
            state=state,
            configuration=configuration,
            created_at=NOW,
            instruction=Instruction(profiling_warmup_steps=1, measuring_steps=5, precision=0.1),
            time_limit_s=self.time_limit_s,
        )
        self.runs[run.id] = run
        return run

    def change(self, run_id, **values):
        self.runs[run_id] = self.runs[run_id].model_copy(update=values)
        return self.runs[run_id]

    def _called(self, name, *details):
        self.calls.append((name, *details))
        if self.away:
            self.away -= 1
            raise ServiceUnreachableError("nothing listens there")

    def job(self, job_id):
        self._called("job")
        plan = [run for run in self.runs.values() if run.kind == "profile"]
        done = sum(run.state in FINAL for run in plan)
        return Job(
            id=job_id, name="j", model_name="m", state="planning", objective="knee", created_at=NOW, runs_done=done,
            runs_planned=len(plan), plan=plan, plan_reason="All is measured.", profiling_cost=NO_COST,
            spec=spec(
                share_launches=self.share_launches,
                on_breach="warn" if self.time_limit_s is None else "stop",
                options=self.options,
            ),
        )  # fmt: skip

    def create_token(self, wanted):
        self._called("create_token", wanted)
        token = Token(id="t", name=wanted.name, scope=wanted.scope, job_id=wanted.job_id, created_at=NOW)
        return TokenCreated(token=token, secret=f"secret of {wanted.job_id}")

    def revoke_token(self, token_id):
        self._called("revoke_token", token_id)

    def claim(self, job_id, claim):
        self._called("claim", claim.max_nodes)
        for run in self.runs.values():
            if run.state == "pending" and run.configuration.num_nodes <= claim.max_nodes:
                nodes = run.configuration.num_nodes if claim.whole_launch else None
                launch = [r for r in self.runs.values() if r.state == "pending" and r.configuration.num_nodes == nodes]
                leased = sorted(launch or [run], key=lambda each: each.configuration.local_batch_size)
                self.holders.update({each.id: claim.holder for each in leased})
                *smaller, largest = [self.change(each.id, state="claimed") for each in leased]
                return RunClaimed(run=largest, smaller=smaller, reason="")
        unfinished = any(run.state in ("pending", "claimed", "running") for run in self.runs.values())
        return RunClaimed(run=None, reason="done", retry_after_s=2.0 if unfinished else None)

    def create_run(self, job_id, run):
        self._called("create_run", run.configuration)
        if run.continues is not None and run.continues not in self.runs:
            problem = Problem(type=ProblemType.INVALID, title="Invalid", status=422, detail="None.", field="continues")
            raise InvalidInputError(problem)
        self.continued.append(run.continues)
        made = self.add(run.kind, run.configuration, "claimed")
        self.holders[made.id] = run.holder
        return made

    def run(self, run_id):
        self._called("run")
        return self.runs[run_id]

    def patch_run(self, run_id, patch):
        self._called("patch_run", run_id, patch.state)
        run = self.runs[run_id]
        if run.state == patch.state in FINAL and self.holders.get(run_id) == patch.holder:
            self.output[run_id] = patch.output or self.output.get(run_id)
            return run
        if run.state in FINAL or self.holders.get(run_id) != patch.holder:
            detail = "The run is already over or somebody else's."
            raise ConflictError(Problem(type=ProblemType.CONFLICT, title="Conflict", status=409, detail=detail))
        self.output[run_id] = patch.output or self.output.get(run_id)
        return self.change(run_id, state=patch.state, message=patch.message, end_cause=patch.end_cause)

    def patch_job(self, job_id, patch):
        self._called("patch_job", patch)
        self.share_launches = patch.share_launches
        return self.job(job_id)

    def recommendation(self, job_id, *, objective=None):
        self._called("recommendation")
        chosen = self.chosen and candidate(self.chosen)
        return Recommendation(
            id="x", job_id=job_id, created_at=NOW, basis=self.basis, objective="knee", chosen=chosen,
            knee=Knee(found=False, reason=""), why="No reason.", candidates=self.candidates, frontier=[],
            model=ModelReport(form="", version="", num_runs=0, num_samples=0),
        )  # fmt: skip


class FakeProcess:
    """A process that exits with `status` after `lasts` polls; just before, `during` simulates the agent's reports."""

    def __init__(self, status=0, lasts=2, during=None):
        self.status, self.left, self.during, self.asked = status, lasts, during, []

    def poll(self):
        if self.left > 0:
            self.left -= 1
            return None
        if self.during is not None:
            self.during()
            self.during = None
        return self.status

    def request_stop(self, *, stacks=False):
        self.asked.append("stop with stacks" if stacks else "stop")
        self.left, self.status = 0, 143

    def stop(self):
        self.request_stop()


class Bench:
    """A runner with fakes; `fates` returns the process for each command that starts."""

    def __init__(self, tmp_path, service, fates, reporter, *, inherited=None, **options):
        self.now, self.started, self.stop_commands, self.fates = 0.0, [], [], fates
        self.work = WorkDir(tmp_path, "job-1")
        self.work.path.mkdir(parents=True, exist_ok=True)
        self.runner = Runner(
            service,
            self.work,
            "me",
            reporter,
            inherited={"PATH": "/bin", **(inherited or {})},
            **options,
            start_command=self.start,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def sleep(self, seconds):
        self.now += seconds

    def start(self, command, *, environment, log, grace_s, stop_command):
        process = self.fates(command, environment, log)
        self.started.append((command, environment, process))
        self.stop_commands.append(stop_command)
        return process


class Notes:
    """A reporter that stores what it receives."""

    def __init__(self):
        self.notes, self.waits, self.ends, self.printed, self.took_s = [], [], [], [], {}

    def job(self, job):
        self.last = job

    def started(self, run, log):
        pass

    def output(self, lines):
        self.printed += lines

    def finished(self, run, outcome, log, took_s):
        self.ends.append((run.id, outcome.state))
        self.took_s[run.id] = took_s

    def waiting(self, reason):
        self.waits.append(reason)

    def note(self, text):
        self.notes.append(text)


def configuration(nodes=1, batch=32, accumulation=1, **options):
    chosen = tuple(sorted(options.items()))
    return Configuration(num_nodes=nodes, local_batch_size=batch, grad_accum_steps=accumulation, options=chosen)


def candidate(configuration, **fields):
    one = Estimate(value=1, low=1, high=1)
    size = configuration.global_batch_size
    return Candidate(
        configuration=configuration,
        global_batch_size=size,
        step_time_s=one,
        epoch_time_s=one,
        total_time_s=one,
        **fields,
    )
