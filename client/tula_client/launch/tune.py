"""`tula tune`: work through a job's plan with the user's own launch command, end with its recommendation."""

from __future__ import annotations

from dataclasses import dataclass

from tula_client.launch._errors import LaunchError
from tula_client.launch.outcome import Outcome
from tula_client.launch.report import Reporter
from tula_client.launch.runner import Active, Runner
from tula_client.launch.service import Service
from tula_client.launch.template import Template
from tula_wire import ClaimRequest, Job, Recommendation, Run

__all__ = ["NotAsToldError", "PlanOptions", "TooManyFailuresError", "Tuned", "work_through"]

_LONGEST_WAIT_S = 5.0
_LOOKS_BEFORE_GIVING_UP = 6


class NotAsToldError(LaunchError):
    """The script ran with another batch or number of ranks than it was given."""


class TooManyFailuresError(LaunchError):
    """Runs fail one after the other: the command is probably at fault."""


@dataclass(frozen=True)
class PlanOptions:
    """How much of the plan runs at once, and when to give up."""

    max_parallel: int = 1
    node_budget: int | None = None
    max_failures: int = 3


@dataclass(frozen=True)
class Tuned:
    """What came of the plan."""

    job: Job
    recommendation: Recommendation
    finished: tuple[tuple[Run, Outcome], ...]
    reason: str


def work_through(
    service: Service, job: Job, template: Template, runner: Runner, options: PlanOptions, reporter: Reporter
) -> Tuned:
    """Run what the plan still wants, up to `max_parallel` runs on at most `node_budget` nodes at once.

    A run that fails before any has succeeded stops everything, as do `max_failures` failures in a row; what was
    measured stays. So does a run that did not do as told.
    Raises `TooManyFailuresError`, `NotAsToldError`, `CommandNotFoundError`, `LaunchError` when what is left needs more
    nodes than there are, and what the client raises.
    """
    budget = options.node_budget or max(cluster.max_nodes for cluster in job.spec.cluster)
    runner.cancel_left()
    _release_orphans(job, runner)
    active: list[Active] = []
    finished: list[tuple[Run, Outcome]] = []
    too_few_nodes = 0
    failures, succeeded = 0, any(run.state == "succeeded" for run in job.plan)
    reason = job.plan_reason
    try:
        while True:
            for one in list(active):
                status = runner.attend(one)
                if status is None:
                    continue
                active.remove(one)
                outcome = runner.judge(one, status)
                finished.append((one.run, outcome))
                succeeded |= outcome.state == "succeeded"
                failures = failures + 1 if outcome.state == "failed" else 0
                reporter.job(runner.patiently(service.job, job.id))
                if outcome.state == "succeeded":
                    _check_told(service, job, one, runner)
                if failures and (not succeeded or failures >= options.max_failures):
                    raise TooManyFailuresError(_failed(one, outcome, failures))
            wait_s = runner.options.poll_s
            free = budget - sum(one.run.configuration.num_nodes for one in active)
            if len(active) < options.max_parallel and free > 0:
                claim = ClaimRequest(holder=runner.holder, lease_s=runner.options.lease_s, max_nodes=free)
                claimed = runner.patiently(service.claim, job.id, claim)
                if claimed.run is not None:
                    active.append(runner.start(claimed.run, template))
                    continue
                reason = claimed.reason
                if not active:
                    if claimed.retry_after_s is None:
                        break
                    # Looked at more than once: another tula's run may just have ended, and the plan be about to change.
                    short = _nodes_missing(runner.patiently(service.job, job.id), budget)
                    too_few_nodes = 0 if short is None else too_few_nodes + 1
                    if short is not None and too_few_nodes >= _LOOKS_BEFORE_GIVING_UP:
                        raise LaunchError(short)
                    reporter.waiting(claimed.reason)
                    wait_s = min(claimed.retry_after_s, _LONGEST_WAIT_S)
                else:
                    wait_s = max(wait_s, 0.2)
            runner.sleep(wait_s)
    except BaseException:
        for one in active:
            one.process.request_stop()
        for one in active:
            runner.abandon(one)
        raise
    job = runner.patiently(service.job, job.id)
    return Tuned(job, runner.patiently(service.recommendation, job.id), tuple(finished), reason)


def _release_orphans(job: Job, runner: Runner) -> None:
    """Give back what an earlier `tula` of this folder left leased; the folder's lock says that it is gone."""
    for run in job.plan:
        if run.state in ("claimed", "running"):
            runner.release(run)


def _nodes_missing(job: Job, budget: int) -> str | None:
    """What is wrong when nobody could run what waits on so many nodes, else None."""
    waiting = [run.configuration.num_nodes for run in job.plan if run.state == "pending"]
    at_work = any(run.state in ("claimed", "running") for run in job.plan)
    if not waiting or at_work or min(waiting) <= budget:
        return None
    return (
        f"the runs that are left need at least {min(waiting)} nodes, but --nodes is {budget}: raise it, or lower "
        "max_nodes in the job; what was measured is kept"
    )


def _check_told(service: Service, job: Job, one: Active, runner: Runner) -> None:
    """Stop when the agent saw another configuration than planned: every further run would measure the same one."""
    warnings = runner.patiently(service.recommendation, job.id).model.warnings
    said = next((warning for warning in warnings if one.run.id in warning), None)
    if said is not None:
        raise NotAsToldError(f"{said} What was measured is kept, as what it was; log: {one.log}")


def _failed(one: Active, outcome: Outcome, failures: int) -> str:
    lines = "".join(f"\n    {line}" for line in outcome.lines)
    many = f" {failures} runs in a row have failed." if failures > 1 else ""
    return (
        f"run {one.run.id} failed: {outcome.message}{many} Mend the command and start the same again: what was "
        f"measured is kept. Log: {one.log}{lines}"
    )
