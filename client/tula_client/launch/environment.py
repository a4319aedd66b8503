"""The environment variables of a launched command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tula_wire import Run

_TORCHRUN: Final = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})


def run_variables(
    run: Run,
    *,
    url: str,
    token: str | None,
    spool: Path,
    checkpoints: Path,
    restart: int,
    smaller: Sequence[Run] = (),
) -> dict[str, str]:
    """The `TULA_*` variables of `run`, listed in `docs/launchers.md`; `smaller`: the other runs of its launch."""
    configuration = run.configuration
    variables = {
        "TULA_URL": url,
        "TULA_RUN_ID": run.id,
        "TULA_JOB_ID": run.job_id,
        "TULA_KIND": run.kind,
        "TULA_SPOOL_DIR": str(spool),
        "TULA_CHECKPOINT_DIR": str(checkpoints),
        "TULA_RESTART": str(restart),
        "TULA_NUM_NODES": str(configuration.num_nodes),
        "TULA_RANKS_PER_NODE": str(configuration.ranks_per_node),
        "TULA_LOCAL_BATCH_SIZE": str(configuration.local_batch_size),
        "TULA_GRAD_ACCUM_STEPS": str(configuration.grad_accum_steps),
    }
    if run.time_limit_s is not None:
        variables["TULA_TIME_LIMIT_S"] = f"{run.time_limit_s:.1f}"
    if smaller:
        variables["TULA_COLUMN"] = ",".join(f"{each.configuration.local_batch_size}={each.id}" for each in smaller)
    if token:
        variables["TULA_TOKEN"] = token
    if run.instruction is not None:
        variables["TULA_WARMUP_STEPS"] = str(run.instruction.profiling_warmup_steps)
        variables["TULA_MEASURE_STEPS"] = str(run.instruction.measuring_steps)
        variables["TULA_PRECISION"] = repr(run.instruction.precision)
        if run.instruction.probe_s > 0.0:
            variables["TULA_PROBE_S"] = repr(run.instruction.probe_s)
    return variables


def starts_torchrun(command: Sequence[str]) -> bool:
    """True if a word of `command`, or a word within one as in `bash -c "torchrun ..."`, is torchrun or its module."""
    return any(part.rpartition("/")[2] in _TORCHRUN for word in command for part in word.split())


def command_environment(
    inherited: Mapping[str, str], variables: Mapping[str, str], command: Sequence[str] = ()
) -> dict[str, str]:
    """The environment of `command`: inherited, without the `TULA_*` variables of an outer run, output unbuffered."""
    kept = {name: value for name, value in inherited.items() if not name.startswith("TULA_")}
    defaults = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    if starts_torchrun(command):
        # torchrun sets this itself, but only if it starts more than one rank on a node. A run of one rank would use
        # every core, and its measurement could not be compared with that of other runs.
        defaults["OMP_NUM_THREADS"] = "1"
    if "TULA_DISABLED" in inherited:
        defaults["TULA_DISABLED"] = inherited["TULA_DISABLED"]
    return {**defaults, **kept, **variables}
