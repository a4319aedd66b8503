"""What the service answers is checked before a command is started from it: a wrong answer could end a training early.

A run becomes the command's arguments and `TULA_*` variables. With the kind `profile`, for example, the agent would end
a training after a few steps, with exit code 0.
"""

from __future__ import annotations

from dataclasses import replace

from tula_client._errors import LaunchError
from tula_wire import ClaimRequest, Configuration, Job, Run, RunClaimed, RunKind


def check_run(run: Run, job: Job, kind: RunKind, configuration: Configuration) -> Run:
    """`run`, if it is the run of `job` that was asked for; else raises `LaunchError` naming the first wrong field."""
    _expect(run, "job_id", run.job_id == job.id, job.id)
    _expect(run, "kind", run.kind == kind, kind)
    _expect(run, "configuration", run.configuration == configuration, configuration)
    limited = kind == "train" and job.spec.limits.on_breach == "stop"
    _expect(run, "time_limit_s", run.time_limit_s is None or limited, "null, since nothing stops a run at its limits")
    return run


def check_claim(claimed: RunClaimed, claim: ClaimRequest, job: Job) -> None:
    """Check the runs that `claim` got: of the job's plan, and of a column only the local batch differs."""
    if claimed.run is None:
        return
    largest = check_configuration(claimed.run.configuration, job)
    check_run(claimed.run, job, "profile", largest)
    _expect(claimed.run, "configuration", largest.num_nodes <= (claim.max_nodes or largest.num_nodes), "fewer nodes")
    for run in claimed.smaller:
        batch = check_configuration(run.configuration, job).local_batch_size
        _expect(run, "configuration", batch < largest.local_batch_size, "a smaller batch")
        check_run(run, job, "profile", replace(largest, local_batch_size=batch))


def check_configuration(configuration: Configuration, job: Job) -> Configuration:
    """`configuration`, if the job's specification allows it; else raises `LaunchError`."""
    batch = job.spec.batch
    clusters = [one for one in job.spec.cluster if one.instance_type == configuration.instance_type]
    fixed = batch.global_batch_size is not None
    allowed = (
        any(
            one.ranks_per_node == configuration.ranks_per_node
            and one.min_nodes <= configuration.num_nodes <= one.max_nodes
            for one in clusters
        )
        and configuration.local_batch_size <= (batch.max_local_batch_size or configuration.local_batch_size)
        and (fixed or configuration.local_batch_size >= batch.min_local_batch_size)
        and (fixed or configuration.grad_accum_steps <= batch.max_grad_accum_steps)
        and configuration.global_batch_size == (batch.global_batch_size or configuration.global_batch_size)
    )
    if not allowed:
        raise LaunchError(f"the service answered {configuration}, which the job's specification rules out: not started")
    return configuration


def _expect(run: Run, field: str, holds: bool, wanted: object) -> None:
    if not holds:
        raise LaunchError(
            f"the service answered run {run.id} with {field} {getattr(run, field)}, where {wanted} was expected: its "
            "command is not started"
        )
