"""Reads and validates the agent's configuration, which comes from environment variables."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tula_agent.guard import logger

N = TypeVar("N", int, float)

DEFAULT_WARMUP_STEPS, DEFAULT_MEASURE_STEPS = 5, 30
"""Numbers of steps in a profiling run if the environment does not set them; job specifications have the same defaults.
"""

_LONGEST_PROBE_S = 60.0
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,199}")
_OFF = ("", "0", "false", "no")

MEASURED_BY = "TULA_MEASURED_BY"
"""Environment variable that a measured process sets for its child processes, which belong to no run."""

UNKNOWN_RUN = "unknown-run"
"""Placeholder in requests and keys for the id of a run that the agent creates itself."""


@dataclass(frozen=True)
class WantedJob:
    """Name or id of a job; if the job does not exist, it is registered with this dataset size and number of epochs."""

    name: str
    dataset_size: int | None = None
    epochs: float | None = None


@dataclass(frozen=True)
class ProfilePlan:
    """Plan of a profiling run.

    warmup_steps, measure_steps: the numbers of steps to discard and to measure. precision: the run may end early once
    the relative error of the step time falls to this value (0: never).
    smaller_batches: local batch sizes that the same launch measures first, in ascending order, each with its run.
    probe_s: the number of seconds that the ranks spend timing all-reduces after the first warm-up (0: none).
    """

    warmup_steps: int
    measure_steps: int
    precision: float = 0.0
    smaller_batches: tuple[tuple[int, str], ...] = ()
    probe_s: float = 0.0


@dataclass(frozen=True)
class AgentConfig:
    """Configuration of the agent in one process: its rank in the job, what to measure, and where to send the data."""

    url: str
    run_id: str
    job_id: str | None
    token: str | None
    spool_dir: Path
    rank: int
    world_size: int
    ranks_per_node: int
    restart: str
    plan: ProfilePlan | None
    local_batch_size: int | None
    grad_accum_steps: int | None
    planned_ranks: int | None = None
    supervised: bool = False
    lease: int | None = None
    job: WantedJob | None = None
    options: tuple[tuple[str, str], ...] = ()
    exit_deadline_s: float = 5.0
    row_limit: int = 20_000

    @property
    def restarted(self) -> bool:
        """Return True if `tula run` or torchrun started this process to replace one that ended."""
        return any(count not in _OFF for count in self.restart.split("-"))


def read_config(environ: Mapping[str, str] = os.environ, job: WantedJob | None = None) -> AgentConfig | None:
    """Return the configuration, or None if TULA_URL is not set, TULA_DISABLED is set or there is no run to report to.

    job: the job for which the agent creates a run if no launcher has created one. If `job` has no name, TULA_JOB
    provides the name. The function never raises; it logs an invalid value and treats it as absent.
    """
    read = _Environment(environ)
    url = read.text("TULA_URL").rstrip("/")
    if not url or read.text("TULA_DISABLED").lower() not in _OFF:
        return None
    if not url.startswith(("http://", "https://")):
        logger.warning("nothing is measured: TULA_URL is %r, but must be an http:// or https:// address", url)
        return None
    run_id, job_to_join = read.text("TULA_RUN_ID"), job or WantedJob("")
    job_to_join = replace(job_to_join, name=(job_to_join.name or read.text("TULA_JOB")).strip())
    makes_run = not run_id and bool(job_to_join.name)
    if not makes_run and not is_id(run_id):
        remedy = "start the script with `tula run`, or set TULA_JOB to the name of its job"
        logger.warning("nothing is measured: TULA_RUN_ID is %r, which is not a run id; %s", run_id, remedy)
        return None
    process, _, measured = read.text(MEASURED_BY).partition(":")
    if measured == (job_to_join.name if makes_run else run_id) and process != str(os.getpid()):
        remedy = "call tula_agent.init() only in the processes that train, not in a process that starts them"
        logger.warning("this process is not measured, because its parent process %s is measured: %s", process, remedy)
        return None
    job_id = read.text("TULA_JOB_ID")
    nodes, ranks_per_node = read.number(int, 1, "TULA_NUM_NODES"), read.number(int, 1, "TULA_RANKS_PER_NODE")
    world_size = read.number(int, 1, "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE") or 1
    return AgentConfig(
        url=url,
        run_id=UNKNOWN_RUN if makes_run else run_id,
        job_id=job_id if is_id(job_id) else None,
        token=environ.get("TULA_TOKEN") or None,
        spool_dir=Path(environ.get("TULA_SPOOL_DIR") or default_spool_dir()),
        rank=read.number(int, 0, "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK") or 0,
        world_size=world_size,
        # srun does not set LOCAL_WORLD_SIZE, and a command may start fewer ranks than planned.
        ranks_per_node=read.number(int, 1, "LOCAL_WORLD_SIZE") or min(ranks_per_node or 1, world_size),
        restart="-".join((environ.get("TULA_RESTART", "0"), environ.get("TORCHELASTIC_RESTART_COUNT", "0"))),
        plan=_plan(read),
        local_batch_size=read.number(int, 1, "TULA_LOCAL_BATCH_SIZE"),
        grad_accum_steps=read.number(int, 1, "TULA_GRAD_ACCUM_STEPS"),
        planned_ranks=None if nodes is None or ranks_per_node is None else nodes * ranks_per_node,
        supervised=read.text("TULA_SUPERVISED").lower() not in _OFF,
        lease=read.number(int, 0, "TULA_LEASE"),
        job=job_to_join if makes_run else None,
        options=_options(read.text("TULA_OPTIONS")),
    )


def keep_children_out(config: AgentConfig) -> None:
    """Keep child processes, such as an evaluation or the trials of a search, out of this process's run.

    A child process inherits the variables that name the run, so it would otherwise report as the rank that started it.
    """
    os.environ[MEASURED_BY] = f"{os.getpid()}:{config.job.name if config.job else config.run_id}"


def is_id(value: object) -> bool:
    """Return True if `value` is a valid id (`Id` in `tula_wire`), which can safely be part of a path."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if a launcher started this process as a rank; SLURM_NTASKS is ignored, as allocations set it too."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return True
    sizes = (
        _Environment(environ).number(int, 1, f"{name}") for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    )
    return any((size or 1) > 1 for size in sizes)


def _plan(read: _Environment) -> ProfilePlan | None:
    kind = read.text("TULA_KIND")
    if kind not in ("", "profile", "train"):
        logger.warning("TULA_KIND is %r and is ignored: it must be profile or train", kind)
    measure = read.number(int, 1, "TULA_MEASURE_STEPS") or (DEFAULT_MEASURE_STEPS if kind == "profile" else None)
    if measure is None or kind == "train":
        return None
    warmup = read.number(int, 0, "TULA_WARMUP_STEPS")
    return ProfilePlan(
        DEFAULT_WARMUP_STEPS if warmup is None else warmup,
        measure,
        read.number(float, 0, "TULA_PRECISION", most=1) or 0.0,
        _smaller_batches(read.text("TULA_SMALLER_BATCHES")),
        read.number(float, 0, "TULA_PROBE_S", most=_LONGEST_PROBE_S) or 0.0,
    )


def _smaller_batches(text: str) -> tuple[tuple[int, str], ...]:
    """Return the batch sizes and runs in TULA_SMALLER_BATCHES (`8=run-1,16=run-2`); empty if `text` can't be parsed."""
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    batches = tuple(sorted((int(size), run) for size, _, run in pairs if size.isdecimal() and is_id(run)))
    if len(batches) == len(pairs) and all(size >= 1 for size, _ in batches):
        return batches
    logger.warning("TULA_SMALLER_BATCHES is %r and is ignored: it must list batch sizes and runs, as in 8=run-1", pairs)
    return ()


def _options(text: str) -> tuple[tuple[str, str], ...]:
    """Return the names and values in TULA_OPTIONS, such as `compile=on,precision=bf16`; skip malformed entries."""
    pairs = (part.strip().partition("=") for part in text.split(","))
    return tuple((name, value) for name, equals, value in pairs if name and equals)


class _Environment:
    """Reads environment variables; logs an invalid value and treats it as absent."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str) -> str:
        return self._environ.get(name, "").strip()

    def number(self, kind: type[N], least: N, *names: str, most: float = math.inf) -> N | None:
        """Return the value of the first variable in `names` that is a finite number within the bounds, or None."""
        for name in names:
            if text := self.text(name):
                with suppress(ValueError, OverflowError):
                    value = kind(text)
                    if least <= value <= most and math.isfinite(value):
                        return value
                bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most:g}"
                whole = "whole " if kind is int else ""
                logger.warning("%s is %r and is ignored: it must be a %snumber %s", name, text, whole, bounds)
        return None


def default_spool_dir() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    try:
        root = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError:  # there is no home directory, as in many containers
        root = Path(tempfile.gettempdir())
    return root / "tula" / "spool"
