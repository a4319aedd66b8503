"""Executes a job's profiling plan for `tula tune` with the user's launch command, and gets the recommendation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from types import MappingProxyType
from typing import Final

from tula_client._errors import LaunchError, UsageError
from tula_client.launch.judge import Outcome
from tula_client.launch.run_loop import POLL_S, ActiveRun, Runner
from tula_client.launch.template import Template
from tula_wire import Configuration, Job, JobPatch, Recommendation, Run, RunClaimed
from tula_wire.format import duration, money, option
from tula_wire.options import Options, complete

_MAX_WAIT_S = 5.0
_WAIT_BESIDE_RUNS_S = 0.2
_MAX_CHECKS_OF_NODES = 6
_ENDED: Final = ("succeeded", "failed", "out_of_memory")
_SHAPE: Final = re.compile(r"(\d{1,9})x(\d{1,9})(?:x(\d{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class Tuned:
    """The job and its recommendation after the plan was executed, and the runs that ended during the plan."""

    job: Job
    recommendation: Recommendation
    finished: tuple[tuple[Run, Outcome], ...]


def work_through(
    runner: Runner,
    job: Job,
    template: Template,
    *,
    max_parallel: int = 1,
    node_budget: int | None = None,
    max_failures: int = 3,
    again: Sequence[Configuration] = (),
) -> Tuned:
    """Execute the pending runs of the plan, with up to `max_parallel` concurrent runs on at most `node_budget` nodes.

    `again` lists configurations to measure again before the plan. Raises `LaunchError` if a run fails before any run
    has succeeded, after `max_failures` consecutive failures, if a run used a configuration that was not planned, or if
    every pending run needs more nodes than `node_budget`. Raises `UsageError` if the command does not exist. May
    also raise the client's errors. Finished measurements are kept in any case.
    """
    # These leases belong to an earlier `tula` process, which must be dead, since this process has the folder's lock.
    runner.release(*(run for run in job.plan if run.state in ("claimed", "running")))
    budget = node_budget or max(cluster.max_nodes for cluster in job.spec.cluster)
    plan = _PlanLoop(runner, job, template, max_parallel, budget, max_failures, list(again))
    while (wait_s := plan.step()) is not None:
        runner.sleep(wait_s)
    job = runner.retrying(runner.service.job, job.id)
    recommendation = runner.retrying(runner.service.recommendation, job.id)
    return Tuned(job, recommendation, tuple(plan.finished))


def to_measure_again(
    words: Sequence[str],
    runs: Iterable[Run],
    candidates: Iterable[Configuration],
    options: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[Configuration, ...]:
    """Return the configurations that `words` name, without duplicates.

    words: each is `failed`, `all`, a run's id, or nodes x local batch (x accumulation) as in `2x64`, which may be
    followed by option values as in `2x64,precision=bf16`. runs: the runs of the job, newest first. options: the options
    of the job. The newest profiling run of a configuration determines whether it failed; `failed` and `all` skip
    configurations whose newest run has not ended. Raises `UsageError` for any other word.
    """
    newest: dict[Configuration, Run] = {}
    for run in runs:
        if run.kind == "profile":
            newest.setdefault(run.configuration, run)
    ended = {configuration: run for configuration, run in newest.items() if run.state in _ENDED}
    configurations: list[Configuration] = []
    for word in words:
        if word in ("failed", "all"):
            configurations += [c for c, run in ended.items() if word == "all" or run.state == "failed"]
        else:
            configurations.append(named_configuration(word, newest, candidates, options))
    return tuple(dict.fromkeys(configurations))


def named_configuration(
    word: str,
    newest: Mapping[Configuration, Run],
    candidates: Iterable[Configuration],
    options: Mapping[str, Sequence[str]] = MappingProxyType({}),
    flag: str = "--again",
) -> Configuration:
    """Return the configuration that `word` names, which is a run's id or a shape such as `2x64` (nodes x local batch).

    A third factor in the shape is the accumulation. Values of the job's `options` may follow, as in
    `2x64,precision=bf16`; an omitted option has its first value.

    newest: the newest run of each configuration. Raises `UsageError`, with `flag` in the message, unless the word
    matches exactly one configuration.
    """
    numbers_word, *pairs = word.split(",")
    shape = _SHAPE.fullmatch(numbers_word)
    fitting = [c for c, run in newest.items() if run.id == word]
    if shape is not None:
        numbers = (int(shape[1]), int(shape[2]), int(shape[3] or 1))
        chosen = _chosen_options(pairs, options, f"{flag} {word}")
        choices = dict.fromkeys(replace(c, options=chosen) for c in (*newest, *candidates))
        fitting = [c for c in choices if (c.num_nodes, c.local_batch_size, c.grad_accum_steps) == numbers]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UsageError(f"{flag} {word} matches several instance types: give the id of a run, which tula runs lists")
    words = "failed, all, " if flag == "--again" else ""
    raise UsageError(
        f"{flag} {word}: the job has no such configuration: give {words}nodes x local batch as in 2x64, or the id of "
        "a run, which tula runs lists"
    )


def _chosen_options(pairs: Sequence[str], options: Mapping[str, Sequence[str]], where: str) -> Options:
    """Return the value of every option, given chosen values such as `precision=bf16`.

    Raises `UsageError`, with `where` in the message, if a value is invalid.
    """
    chosen = [pair.partition("=") for pair in pairs]
    for name, equals, _ in chosen:
        if not equals:
            raise UsageError(f"{where}: {name!r} must be an option and its value, as in 2x64,precision=bf16")
    try:
        return complete(options, tuple((name, word) for name, _, word in chosen))
    except ValueError as error:
        text = str(error)
        raise UsageError(f"{where}: {text[:1].lower()}{text[1:]}".rstrip(".")) from None


def to_explain(job: Job, chosen: Configuration | None) -> tuple[Configuration, ...]:
    """Return one configuration for each option value that the plan has not launched.

    Each result differs in only one option value from a configuration that was measured with the first value of every
    option, so that any difference in step time is due to that value. If several configurations were measured, those on
    the cluster of `chosen` are preferred, and among these the one with the largest batch.
    """
    options, base = job.spec.varied_options, job.spec.base_options
    at_base = [run.configuration for run in job.plan if run.state == "succeeded" and run.configuration.options == base]
    if not at_base:
        return ()
    cluster = None if chosen is None else (chosen.instance_type, chosen.num_nodes)
    start = max(at_base, key=lambda c: ((c.instance_type, c.num_nodes) == cluster, c.local_batch_size, c))
    launched = {pair for run in job.plan if run.state in _ENDED for pair in run.configuration.options}
    return tuple(
        replace(start, options=complete(job.spec.options, ((name, word),)))
        for name in sorted(options)
        for word in options[name]
        if (name, word) not in launched
    )


def cost_of_explaining(job: Job, configurations: Sequence[Configuration]) -> str:
    """Return a sentence with the expected time and cost of launching `configurations`, based on past launches."""
    took_s = [
        (run.finished_at - run.started_at).total_seconds()
        for run in job.plan
        if run.state == "succeeded" and run.started_at is not None and run.finished_at is not None
    ]
    launch_s, number = max(took_s, default=0.0), len(configurations)
    values = ", ".join(option(*_difference(c, job)) for c in configurations)
    prices = {cluster.instance_type: cluster.price.usd_per_node_hour for cluster in job.spec.cluster}
    rates = [(prices[c.instance_type], c.num_nodes) for c in configurations]
    usd = math.fsum(rate * nodes for rate, nodes in rates if rate is not None) * launch_s / 3600
    priced = f" and {money(usd)}" if usd else ""
    return (
        f"--explain launches {number} more value{'s' if number > 1 else ''} ({values}), one launch each, for a "
        f"total of about {duration(number * launch_s)}{priced}."
    )


def _difference(configuration: Configuration, job: Job) -> tuple[str, str]:
    """Return the name and value of the only option of `configuration` whose value is not the option's first value."""
    base = dict(job.spec.base_options)
    return next((name, word) for name, word in configuration.options if base[name] != word)


@dataclass
class _PlanLoop:
    """The state of `work_through` between two steps; `job` is the job as the service last returned it."""

    runner: Runner
    job: Job
    template: Template
    max_parallel: int
    budget: int
    max_failures: int
    again: list[Configuration]
    failures: int = 0
    checks_of_nodes: int = 0
    finished: list[tuple[Run, Outcome]] = field(default_factory=list)

    def step(self) -> float | None:
        """Process ended runs and start the next run; return the seconds to wait, or None if the plan is done."""
        runner = self.runner
        for active in list(runner.active):
            status = runner.poll(active)
            if status is not None:
                self._finish(active, status)
        free = self.budget - sum(active.run.configuration.num_nodes for active in runner.active)
        if len(runner.active) >= self.max_parallel or free <= 0:
            return POLL_S
        examples = self.job.spec.dataset.size * self.job.spec.epochs
        if (run := self._next_again(free)) is not None:
            runner.start(run, self.template, examples=examples)
            return POLL_S
        claimed = runner.claim(self.job, free, whole_launch=self.job.spec.profiling.share_launches)
        if claimed.run is not None:
            runner.start(claimed.run, self.template, smaller=claimed.smaller, examples=examples)
            return POLL_S
        return _WAIT_BESIDE_RUNS_S if runner.active else self._wait_s(claimed)

    def _next_again(self, free: int) -> Run | None:
        """Create a run of the next configuration in `again` that needs at most `free` nodes; return the run or None."""
        fitting = [c for c in self.again if c.num_nodes <= free]
        if self.again and not fitting and not self.runner.active:
            raise LaunchError(
                f"--again needs {self.again[0].num_nodes} nodes, but --nodes is {self.budget}: increase --nodes"
            )
        if not fitting:
            return None
        self.again.remove(fitting[0])
        return self.runner.create_run(self.job, "profile", fitting[0])

    def _finish(self, active: ActiveRun, status: int) -> None:
        finished = self.runner.finish(active, status)
        self.finished += finished
        if active.smaller and [(run.id, outcome.state) for run, outcome in finished] == [(active.run.id, "succeeded")]:
            self._measure_single_batches()
        self._refresh()
        self.runner.reporter.job(self.job)
        for run, outcome in finished:
            self._count(active, run, outcome)

    def _count(self, active: ActiveRun, run: Run, outcome: Outcome) -> None:
        """Raise `LaunchError` if there are too many failures, or if the run used a configuration that was not planned.

        A failure with any option value other than the first is not counted, since the service excludes that value from
        the remaining plan.
        """
        if run.configuration_mismatch is not None:  # every further run would measure the same wrong configuration
            raise LaunchError(
                f"{run.configuration_mismatch} The measurement is kept for the configuration that ran. Correct the "
                f"command and repeat `tula tune` to measure the planned configuration. Log: {active.log}",
                f"run {run.id} used another configuration: correct the command and repeat `tula tune` to measure the "
                "planned configuration",
            )
        if outcome.state == "failed" and run.configuration.options != complete(self.job.spec.options, ()):
            values = ", ".join(starmap(option, run.configuration.options))
            self.runner.reporter.note(
                f"Run {run.id} failed with {values}. The rest of the plan continues. After you correct the command, "
                "`tula tune` will try these values again."
            )
            return
        any_success = any(run.state == "succeeded" for run in self.job.plan)
        self.failures = self.failures + 1 if outcome.state == "failed" else 0
        if self.failures and (not any_success or self.failures >= self.max_failures):
            repeated = f" {self.failures} runs in a row have failed." if self.failures > 1 else ""
            raise LaunchError(
                f"run {run.id} failed: {outcome.message}{repeated} Correct the command and repeat `tula tune`: "
                f"finished measurements are kept. Log: {active.log}{outcome.listed}",
                f"run {run.id} failed.{repeated} Correct the command and repeat `tula tune`: finished measurements are "
                "kept",
            )

    def _measure_single_batches(self) -> None:
        """Tell the service to plan one batch per launch from now on, since a launch measured only its largest batch."""
        self.runner.reporter.note(
            "The launch measured only its largest batch, so from now on each run gets a separate launch, as with "
            "profiling.share_launches = false in the job."
        )
        self.runner.retrying(self.runner.service.patch_job, self.job.id, JobPatch(share_launches=False))

    def _wait_s(self, claimed: RunClaimed) -> float | None:
        """Return the seconds to wait before the next claim if no run is active, or None once the plan is done."""
        if claimed.retry_after_s is None:
            return None
        # Check several times, since another `tula` process may have just ended a run and the service may be replanning.
        self._refresh()
        running = any(run.state in ("claimed", "running") for run in self.job.plan)
        nodes = min((run.configuration.num_nodes for run in self.job.plan if run.state == "pending"), default=0)
        self.checks_of_nodes = self.checks_of_nodes + 1 if nodes > self.budget and not running else 0
        if self.checks_of_nodes >= _MAX_CHECKS_OF_NODES:
            raise LaunchError(
                f"the pending runs need at least {nodes} nodes, but --nodes is {self.budget}: increase --nodes or "
                "lower max_nodes in the job; finished measurements are kept"
            )
        self.runner.reporter.waiting(claimed.reason)
        return min(claimed.retry_after_s, _MAX_WAIT_S)

    def _refresh(self) -> None:
        self.job = self.runner.retrying(self.runner.service.job, self.job.id)
