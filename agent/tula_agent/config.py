"""The agent's configuration from environment variables, read once and validated."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tula_agent.guard import logger

N = TypeVar("N", int, float)

DEFAULT_WARMUP_STEPS, DEFAULT_MEASURE_STEPS = 5, 30
"""Of a profiling run whose environment does not give them; those of a job's specification."""

_LONGEST_PROBE_S = 60.0
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,199}")
_OFF = ("", "0", "false", "no")

UNKNOWN_RUN = "unknown-run"
"""Stands for the id of a run that the agent makes by itself, in requests and keys."""


@dataclass(frozen=True)
class WantedJob:
    """The name or id of a job, and what registers it where there is none: examples of an epoch, and epochs."""

    name: str
    dataset_size: int | None = None
    epochs: float | None = None


@dataclass(frozen=True)
class ProfilePlan:
    """A profiling run: steps to discard, steps to measure, and the relative error that ends it early (0: never).

    column: smaller local batches that the same launch measures first, ascending, each with its run. probe_s: seconds
    for which the ranks time all-reduces after the first warm-up (0: not at all).
    """

    warmup_steps: int
    measure_steps: int
    precision: float = 0.0
    column: tuple[tuple[int, str], ...] = ()
    probe_s: float = 0.0


@dataclass(frozen=True)
class AgentConfig:
    """Place of this process in the job and destination of its measurements; times in seconds, sizes in bytes."""

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
    time_limit_s: float | None = None
    job: WantedJob | None = None
    exit_deadline_s: float = 5.0
    row_limit: int = 20_000

    @property
    def restarted(self) -> bool:
        """True in a process that replaces one that ended, started by `tula run` or by torchrun."""
        return any(count not in _OFF for count in self.restart.split("-"))


def read_config(environ: Mapping[str, str] = os.environ, job: WantedJob | None = None) -> AgentConfig | None:
    """The configuration, or None to do nothing: no TULA_URL, TULA_DISABLED, or no run to report to.

    job: whose run the agent makes by itself where no launcher has made one; without a name, that in TULA_JOB. Never
    raises: an invalid value is logged and treated as absent.
    """
    url = environ.get("TULA_URL", "").strip().rstrip("/")
    if not url or environ.get("TULA_DISABLED", "").strip().lower() not in _OFF:
        return None
    if not url.startswith(("http://", "https://")):
        logger.warning("TULA_URL is %r: give an http:// or https:// address; nothing is measured", url)
        return None
    run_id = environ.get("TULA_RUN_ID", "").strip()
    wanted = None if run_id else _named(job or WantedJob(""), environ)
    run_id = run_id if wanted is None else UNKNOWN_RUN
    if not is_id(run_id):
        remedy = "start the script with `tula run`, or name its job in TULA_JOB"
        logger.warning("TULA_RUN_ID is %r: %s; nothing is measured", run_id, remedy)
        return None
    job_id = environ.get("TULA_JOB_ID", "").strip()
    return AgentConfig(
        url=url,
        run_id=run_id,
        job_id=job_id if is_id(job_id) else None,
        token=environ.get("TULA_TOKEN") or None,
        spool_dir=Path(environ.get("TULA_SPOOL_DIR") or default_spool_dir()),
        rank=_first(environ, ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"), 0, at_least=0),
        world_size=_first(environ, ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"), 1, at_least=1),
        ranks_per_node=_first(environ, ("LOCAL_WORLD_SIZE",), 1, at_least=1),
        restart="-".join((environ.get("TULA_RESTART", "0"), environ.get("TORCHELASTIC_RESTART_COUNT", "0"))),
        plan=_plan(environ),
        local_batch_size=_integer(environ, "TULA_LOCAL_BATCH_SIZE", at_least=1),
        grad_accum_steps=_integer(environ, "TULA_GRAD_ACCUM_STEPS", at_least=1),
        planned_ranks=_planned_ranks(environ),
        time_limit_s=_number(environ, "TULA_TIME_LIMIT_S", float, lambda s: 0 < s < math.inf, "seconds above 0"),
        job=wanted,
    )


def _planned_ranks(environ: Mapping[str, str]) -> int | None:
    nodes, ranks = (_integer(environ, f"TULA_{name}", at_least=1) for name in ("NUM_NODES", "RANKS_PER_NODE"))
    return None if nodes is None or ranks is None else nodes * ranks


def _named(job: WantedJob, environ: Mapping[str, str]) -> WantedJob | None:
    """`job`, or the one in TULA_JOB; None without a name."""
    name = (job.name or environ.get("TULA_JOB", "")).strip()
    return replace(job, name=name) if name else None


def is_id(value: object) -> bool:
    """True for an id of the service (`tula_wire`'s `Id`): a part of a path as it stands, never `..`."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """True when a launcher started this process as a rank; SLURM_NTASKS alone is the size of an allocation."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return True
    return any(_first(environ, (name,), 1, at_least=1) > 1 for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))


def _plan(environ: Mapping[str, str]) -> ProfilePlan | None:
    kind = environ.get("TULA_KIND", "").strip()
    if kind not in ("", "profile", "train"):
        logger.warning("TULA_KIND is %r: give profile or train; it is ignored", kind)
    measure = _integer(environ, "TULA_MEASURE_STEPS", at_least=1)
    if measure is None and kind == "profile":
        measure = DEFAULT_MEASURE_STEPS
    if measure is None or kind == "train":
        return None
    warmup = _integer(environ, "TULA_WARMUP_STEPS", at_least=0)
    precision = _number(environ, "TULA_PRECISION", float, lambda share: 0 <= share <= 1, "a share between 0 and 1")
    warmup = DEFAULT_WARMUP_STEPS if warmup is None else warmup
    probe_s = _number(environ, "TULA_PROBE_S", float, lambda s: 0 <= s <= _LONGEST_PROBE_S, "seconds from 0 to 60")
    return ProfilePlan(warmup, measure, precision or 0.0, _column(environ), probe_s or 0.0)


def _column(environ: Mapping[str, str]) -> tuple[tuple[int, str], ...]:
    """The batches in TULA_COLUMN, as in `8=run-1,16=run-2`; none where it can't be read."""
    pairs = [part.strip().partition("=") for part in environ.get("TULA_COLUMN", "").split(",") if part.strip()]
    column = tuple(sorted((int(size), run) for size, _, run in pairs if size.isdecimal() and is_id(run)))
    if len(column) == len(pairs) and all(size >= 1 for size, _ in column):
        return column
    logger.warning("TULA_COLUMN is %r: give batches with their runs, as in 8=run-1; it is ignored", pairs)
    return ()


def _first(environ: Mapping[str, str], names: tuple[str, ...], default: int, at_least: int) -> int:
    for name in names:
        value = _integer(environ, name, at_least)
        if value is not None:
            return value
    return default


def _integer(environ: Mapping[str, str], name: str, at_least: int) -> int | None:
    return _number(environ, name, int, lambda value: value >= at_least, f"a whole number of at least {at_least}")


def _number(
    environ: Mapping[str, str], name: str, kind: Callable[[str], N], valid: Callable[[N], bool], expected: str
) -> N | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    with suppress(ValueError):
        value = kind(text)
        if valid(value):
            return value
    logger.warning("%s is %r: give %s; it is ignored", name, text, expected)
    return None


def default_spool_dir() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    try:
        root = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError:  # no home, as in many containers
        root = Path(tempfile.gettempdir())
    return root / "tula" / "spool"
