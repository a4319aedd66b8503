"""Launches one configuration alternately on two revisions for `tula gate`, and compares the step times in pairs.

A machine's speed can drift by a few per cent within an hour. Consecutive launches share most of that drift, so each
launch of the change is compared with the adjacent launch of the base. Every second pair starts with the change.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Final

from tula_client._errors import LaunchError, UsageError
from tula_client.launch.run_loop import POLL_S, Runner
from tula_client.launch.template import Template
from tula_wire import Configuration, Estimate, Job
from tula_wire.precision import half_width

FEWEST_PAIRS: Final = 3
_GIT_S: Final = 120.0


@dataclass(frozen=True)
class Side:
    """One of the two revisions, with the job that records its launches and the runner that starts them."""

    name: str
    job: Job
    runner: Runner

    def step_time_s(self, configuration: Configuration, template: Template) -> float:
        """Launch the configuration once and return the measured seconds per step.

        Raises `LaunchError` if the launch fails or measures another configuration.
        """
        runner = self.runner
        run = runner.create_run(self.job, "profile", configuration)
        spec = self.job.spec
        active = runner.start(run, template, examples=spec.dataset.size * spec.epochs)
        while (status := runner.poll(active)) is None:
            runner.sleep(POLL_S)
        (ended, outcome), *_ = runner.finish(active, status)
        if outcome.state != "succeeded" or ended.step_time_s is None:
            raise LaunchError(f"the launch on {self.name} produced no measurement: {outcome.message} Log: {active.log}")
        if ended.configuration_mismatch is not None:
            raise LaunchError(f"the launch on {self.name} cannot be compared: {ended.configuration_mismatch}")
        return ended.step_time_s

    def peak_bytes(self, configuration: Configuration) -> float | None:
        """Return the peak memory in bytes of a rank in past launches, or None if no launch reported it."""
        answer = self.runner.retrying(self.runner.service.recommendation, self.job.id)
        measured = [
            candidate
            for candidate in answer.candidates
            if candidate.configuration == configuration and candidate.profiled
        ]
        return next(
            (candidate.memory_bytes.value for candidate in measured if candidate.memory_bytes is not None), None
        )


def alternate(
    base: Side, change: Side, configuration: Configuration, template: Template, pairs: int
) -> tuple[list[float], list[float]]:
    """Launch both sides alternately, `pairs` times each; return two lists of seconds per step, paired by index."""
    times_s: dict[str, list[float]] = {"base": [], "change": []}
    for pair in range(pairs):
        order = (("base", base), ("change", change))
        for name, side in order if pair % 2 == 0 else order[::-1]:
            times_s[name].append(side.step_time_s(configuration, template))
    return times_s["base"], times_s["change"]


def slower(base_s: Sequence[float], change_s: Sequence[float]) -> Estimate:
    """Return the relative slowdown of a step due to the change, with a 95 % interval (Student's t over the pairs)."""
    logs = [math.log(after / before) for before, after in zip(base_s, change_s, strict=True)]
    mean = fmean(logs)
    half = half_width(stdev(logs), len(logs))
    return Estimate(value=math.expm1(mean), low=math.expm1(mean - half), high=math.expm1(mean + half))


def git(*words: str, folder: Path | None = None) -> str:
    """Return the output of a git command without the final line break. Raises `UsageError` if the command fails."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--against requires git, which could not be run: {error}") from None
    if done.returncode:
        raise UsageError(f"--against: git {words[0]} failed: {' '.join(done.stderr.split()).rstrip('.')}")
    return done.stdout.rstrip("\n")


def resolve_commit(revision: str) -> str:
    """Return the full id of the commit that `revision` names. Raises `UsageError` if git does not find the revision."""
    if revision.startswith("-"):
        raise UsageError(f"--against {revision} is not a revision: give a commit, a tag or a branch")
    return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")


@contextmanager
def checkout(commit: str, parent: Path) -> Iterator[Path]:
    """Check out a commit into a new folder in `parent`; yield the checkout's counterpart of the current folder.

    The checkout is a worktree of this repository, and is removed on exit. Raises `UsageError` if git fails or if the
    commit lacks the current folder.
    """
    inside = git("rev-parse", "--show-prefix")
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="base-", dir=parent, ignore_cleanup_errors=True) as made:
        tree = Path(made) / "tree"
        try:
            git("worktree", "add", "--quiet", "--detach", os.fspath(tree), commit)
            folder = tree / inside
            if not folder.is_dir():
                raise UsageError(f"--against: {inside} does not exist at {commit[:7]}: run this in a folder that does")
            yield folder
        finally:
            with suppress(UsageError):  # git later prunes a worktree whose folder is gone
                git("worktree", "remove", "--force", "--force", os.fspath(tree))


def refuse_tracked_paths(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise `UsageError` if the command contains the absolute path of a tracked file, which both revisions would use.

    words: the arguments of the command. environment: its environment variables; only PYTHONPATH is checked.
    """
    named = [(part, "the command") for word in words for part in word.split("=")]
    named += [(part, "PYTHONPATH") for part in environment.get("PYTHONPATH", "").split(os.pathsep)]
    top = Path(git("rev-parse", "--show-toplevel")).resolve()
    for part, where in named:
        path = Path(part)
        if (
            path.is_absolute()
            and path.resolve().is_relative_to(top)
            and git("ls-files", "--", os.fspath(path.resolve()))
        ):
            raise UsageError(
                f"{where} names {part}, so both revisions would run the same file: use a relative path instead"
            )
