"""The environment variables that a launched command sees: the service, the run, and what to do in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tula_wire import Run

__all__ = ["run_variables", "whole_environment"]


def run_variables(
    run: Run,
    *,
    url: str,
    token: str | None,
    spool: Path,
    checkpoints: Path,
    restart: int,
    stacks_at_s: float | None = None,
) -> dict[str, str]:
    """Tula's own variables for `run`; `docs/launchers.md` lists them."""
    configuration = run.configuration
    variables = {
        "TULA_URL": url,
        "TULA_RUN_ID": run.id,
        "TULA_JOB_ID": run.job_id,
        "TULA_SPOOL_DIR": str(spool),
        "TULA_CHECKPOINT_DIR": str(checkpoints),
        "TULA_RESTART": str(restart),
        "TULA_NUM_NODES": str(configuration.num_nodes),
        "TULA_RANKS_PER_NODE": str(configuration.ranks_per_node),
        "TULA_LOCAL_BATCH_SIZE": str(configuration.local_batch_size),
        "TULA_GRAD_ACCUM_STEPS": str(configuration.grad_accum_steps),
    }
    if stacks_at_s is not None:
        variables["TULA_STACKS_AT"] = f"{stacks_at_s:.1f}"
    if token:
        variables["TULA_TOKEN"] = token
    if run.instruction is not None:
        variables["TULA_WARMUP_STEPS"] = str(run.instruction.profiling_warmup_steps)
        variables["TULA_MEASURE_STEPS"] = str(run.instruction.measuring_steps)
        variables["TULA_PRECISION"] = repr(run.instruction.precision)
    return variables


def whole_environment(inherited: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """What the command inherits, without an outer Tula run's variables, and with stacks and output shown at once."""
    kept = {name: value for name, value in inherited.items() if not name.startswith("TULA_")}
    defaults = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    outer = {name: inherited[name] for name in ("TULA_DISABLED", "TULA_PROJECT") if name in inherited}
    return {**defaults, **kept, **outer, **variables}
