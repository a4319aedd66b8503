"""Starts and stops a launched command under its supervisor, builds its environment, and reads its log.

Neither the command nor its supervisor outlives `tula`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tula_client._errors import UsageError
from tula_client.launch import supervisor
from tula_wire import Run
from tula_wire.memory import ALLOCATOR_VARIABLES, GROWING_SEGMENTS

_MARGIN_S = 45.0
"""Seconds that the supervisor may need in addition to the grace period, to run the stop command, print the stacks and
send SIGKILL.
"""

_READ_BYTES = 262_144
_MAX_LINE_BYTES = 65_536
_OF_ANOTHER_RANK = re.compile(r"\[(?:default|rank)0*[1-9]\d*\]:")
"""Matches the prefix with which torchrun and torch mark the output of every rank except the first."""
_TORCHRUN: Final = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
_RANK_OPTIONS: Final = frozenset(
    {"-t", "--tee", "-r", "--redirects", "--log-dir", "--log_dir", "--logs-specs", "--logs_specs"}
    | {"--local-ranks-filter", "--local_ranks_filter"}
)
_RANK_VARIABLES: Final = frozenset(
    {"PET_TEE", "PET_REDIRECTS", "PET_LOG_DIR", "PET_LOCAL_RANKS_FILTER", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"}
)
"""Environment variables that set where torchrun writes the output of ranks."""
_WITH_A_VALUE = re.compile(r"-[tr]\d")
"""Matches the short forms of `_RANK_OPTIONS` with a value, such as `-t3`."""
_ELSEWHERE: Final = frozenset(
    {"srun", "ssh", "pdsh", "mpirun", "mpiexec", "kubectl", "docker", "podman", "apptainer", "singularity", "enroot"}
)
"""Programs that start another program on other machines or in a container."""
_TEE: Final = ",".join(f"{local_rank}:3" for local_rank in range(1, 10))
"""Tees both output streams of the local ranks 1 to 9, if they exist; torchrun accepts only single digits here."""


def of_first_rank(lines: Iterable[str]) -> list[str]:
    """Return the lines without those that are marked as the output of a rank other than the first.

    If the mark is in the middle of a line, only the part before the mark is kept, since torchrun wrote the rest of the
    line after a progress bar.
    """
    beginnings = (_OF_ANOTHER_RANK.split(line, maxsplit=1) for line in lines)
    return [beginning for beginning, *other in beginnings if beginning or not other]


class LogLines:
    """Reads new lines from a log, skipping those that are marked as the output of a rank other than the first."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._position = 0
        self._unfinished = b""

    def new(self, *, last: bool = False) -> list[str]:
        """Return the lines that were completed since the last call, at most 256 KiB at a time.

        If `last` is True, read to the end of the file, and include an unfinished last line.
        """
        lines: list[bytes] = []
        try:
            with self._log.open("rb") as file:
                file.seek(self._position)
                while data := file.read(_READ_BYTES):
                    *whole, self._unfinished = (self._unfinished + data).split(b"\n")
                    lines += whole
                    self._unfinished = self._unfinished[-_MAX_LINE_BYTES:]
                    if not last:
                        break
                self._position = file.tell()
        except OSError:
            return []
        if last and self._unfinished:
            lines.append(self._unfinished)
        # Keep only what follows the last carriage return, since a progress bar rewrites its line.
        texts = (line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines)
        return of_first_rank(texts)


class Process:
    """One command that runs under its supervisor and writes all output to one log file."""

    def __init__(self, supervisor_process: subprocess.Popen[bytes], grace_s: float) -> None:
        self._supervisor = supervisor_process
        self._grace_s = grace_s

    def poll(self) -> int | None:
        """Return the exit status (128 + n for signal n), or None while the command runs."""
        status = self._supervisor.poll()
        return status if status is None or status >= 0 else 128 - status

    def request_stop(self, *, stacks: bool = False) -> None:
        """Ask the supervisor to stop the command, and return immediately.

        The supervisor sends SIGTERM to the command, then to the remaining processes, and finally SIGKILL. With
        `stacks`, each rank first prints its stack to the log, which ends the rank.
        """
        if self._supervisor.stdin is not None and self._supervisor.poll() is None:
            with suppress(BrokenPipeError):
                self._supervisor.stdin.write(b"d" if stacks else b"s")
                self._supervisor.stdin.flush()

    def stop(self) -> None:
        """Stop the command and all its descendants."""
        self.request_stop()
        try:
            self._supervisor.wait(timeout=self._grace_s + _MARGIN_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    def __del__(self) -> None:
        if self._supervisor.stdin is not None:
            self._supervisor.stdin.close()


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    grace_s: float = 10.0,
    stop_command: Sequence[str] | None = None,
    folder: Path | None = None,
) -> Process:
    """Start `command` in a new session, in `folder` or the current folder, and append its output to `log`.

    If `command` only submits a cluster job (`sbatch --wait`, `kubectl`), `stop_command` cancels that job. Raises
    `UsageError` if the first word of either command is not a program on this machine.
    """
    for what, words in (("command", command), ("stop command", stop_command)):
        if words and shutil.which(words[0], path=environment.get("PATH")) is None:
            raise UsageError(f"the {what} {words[0]!r} was not found on this machine: check its spelling or install it")
    options = json.dumps({"grace_s": grace_s, "stop_command": stop_command})
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, options, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
        )
    return Process(process, grace_s)


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
    """Return the `TULA_*` variables of `run`, which `docs/commands.md` lists.

    smaller: the runs of smaller batches that the same launch measures.
    """
    configuration = run.configuration
    variables = {
        "TULA_URL": url,
        "TULA_RUN_ID": run.id,
        "TULA_JOB_ID": run.job_id,
        "TULA_KIND": run.kind,
        "TULA_SPOOL_DIR": str(spool),
        "TULA_CHECKPOINT_DIR": str(checkpoints),
        "TULA_RESTART": str(restart),
        "TULA_SUPERVISED": "1",
        "TULA_LEASE": str(run.lease),
        "TULA_NUM_NODES": str(configuration.num_nodes),
        "TULA_RANKS_PER_NODE": str(configuration.ranks_per_node),
        "TULA_LOCAL_BATCH_SIZE": str(configuration.local_batch_size),
        "TULA_GRAD_ACCUM_STEPS": str(configuration.grad_accum_steps),
    }
    if configuration.options:
        variables["TULA_OPTIONS"] = ",".join(f"{name}={value}" for name, value in configuration.options)
    if smaller:
        variables["TULA_SMALLER_BATCHES"] = ",".join(
            f"{other.configuration.local_batch_size}={other.id}" for other in smaller
        )
    if token:
        variables["TULA_TOKEN"] = token
    if run.instruction is not None:
        variables["TULA_WARMUP_STEPS"] = str(run.instruction.profiling_warmup_steps)
        variables["TULA_MEASURE_STEPS"] = str(run.instruction.measuring_steps)
        variables["TULA_PRECISION"] = repr(run.instruction.precision)
        if run.instruction.probe_s > 0.0:
            variables["TULA_PROBE_S"] = repr(run.instruction.probe_s)
    return variables


def command_environment(
    inherited: Mapping[str, str],
    variables: Mapping[str, str],
    command: Sequence[str] = (),
    *,
    rank_logs: Path | None = None,
) -> dict[str, str]:
    """Return the environment in which to run `command`.

    It consists of `variables` and of the inherited variables, except the `TULA_*` variables of an enclosing run, and
    makes Python write its output unbuffered. rank_logs: the folder in which torchrun keeps the output of each rank
    except the first.
    """
    kept = {name: value for name, value in inherited.items() if not name.startswith("TULA_")}
    defaults = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    words = [part for word in command for part in word.split()]  # includes the words in `bash -c "torchrun ..."`
    if any(word.rpartition("/")[2] in _TORCHRUN for word in words):
        # torchrun sets this itself, but only if it starts more than one rank on a node. A run with one rank would use
        # every core, so its measurement could not be compared with those of other runs.
        defaults["OMP_NUM_THREADS"] = "1"
        if rank_logs is not None and _starts_here(words) and not _says_where_ranks_write(words, inherited):
            # The first rank writes to the log directly, so that its output is not delayed. torchrun copies the lines of
            # the other ranks to the log, each marked with its rank.
            defaults["PET_TEE"], defaults["PET_LOG_DIR"] = _TEE, str(rank_logs)
            defaults["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank${rank}]: "
    if not any(name in inherited for name in ALLOCATOR_VARIABLES):
        # Expandable segments avoid fragmentation, so only allocated memory limits the largest batch.
        defaults[ALLOCATOR_VARIABLES[0]] = GROWING_SEGMENTS
    if "TULA_DISABLED" in inherited:
        defaults["TULA_DISABLED"] = inherited["TULA_DISABLED"]
    return {**defaults, **kept, **variables}


def _starts_here(words: Sequence[str]) -> bool:
    """Return True if the command starts torchrun on this machine, where the log folder exists."""
    names = [word.rpartition("/")[2] for word in words]
    here = names[0] in ("torchrun", "bash", "sh", "env", "uv") or names[0].startswith("python")
    return here and _ELSEWHERE.isdisjoint(names)


def _says_where_ranks_write(words: Iterable[str], inherited: Mapping[str, str]) -> bool:
    """Return True if the user already sets a torchrun option or variable that controls the output of ranks."""
    options = {word[:2] if _WITH_A_VALUE.match(word) else word.partition("=")[0] for word in words}
    return not _RANK_OPTIONS.isdisjoint(options) or not _RANK_VARIABLES.isdisjoint(inherited)
