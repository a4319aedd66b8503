"""Determines the outcome of a finished command from its exit status, its log and the run's state on the service."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tula_wire import Run, RunPatch, RunState

AGENT_PREFIX: Final = "tula:"
"""The prefix of each line that the agent prints for the user."""

EMBED: Final = "call tula_agent.init() and loop over run.steps(loader) in the script."
"""The remedy to suggest if no measurement arrives."""

_MEMORY_EXCEPTION = re.compile(
    r"^(?:\w+\.)*_?\w*MemoryError\b|(?:CUDA|HIP) out of memory|(?:CUDA|HIP) error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (?:can't allocate|not enough) memory|Cannot allocate memory"
    r"|Caught \w*MemoryError in|RayTaskError\(OutOfMemoryError\)|died with <Signals\.SIGKILL"
)
"""Matches the line of an exception which says that a device or the host ran out of memory."""
_CONSEQUENCE = re.compile(
    r"ChildFailedError|SignalException|ProcessExitedException|DistBackendError|DistNetworkError"
    r"|Connection (?:closed|reset)|Broken pipe|DataLoader worker \(pid"
)
"""Matches exceptions that are caused by the end of another rank or process."""
_KILLED_OR_ABORTED = re.compile(
    r"^terminate called after throwing an instance of '(?:std::bad_alloc|c10::\w*OutOfMemoryError)'"
    r"|^slurmstepd: error: Detected \d+ oom[-_ ]kill|^srun: error: .*: Out Of Memory\b"
    r"|^command terminated with exit code 137\b|^tula: rank \d+ ran out of memory\b"
)
_TORCHRUN_STATUS = re.compile(r"^\s+exitcode\s*:\s*(-?\d+)")
_TRACEBACK = "Traceback (most recent call last)"
_CAUSE = "The above exception was the direct cause of the following exception:"
_RANK = re.compile(r"^(\[(?:rank|default)?(\d+)\]:)\s?(?:\[rank\d+\]:\s?)?")
"""Matches the prefix that torchrun puts before a rank's line, and the prefix that torch puts before a traceback."""
_ELASTIC = re.compile(
    r"torch/distributed/(?:elastic|run|launcher)|multiprocessing/api|torch\.distributed\.elastic|ChildFailedError"
    r"|^=+$|^-+$|^Failures:|^\s*<NO_OTHER_FAILURES>|error_file|traceback : |Root Cause"
    r"|^\s+(?:time|host|rank|exitcode)\s+:|^[WEI]\d{4} |^Traceback \(most recent call last\):$|^\s{2,}"
    r"|^srun: error: \S+: tasks? |^slurmstepd: |^\s*\^+\s*$"
)
_ERROR = re.compile(
    r"\b\w*(?:Error|Exception|Exit|Interrupt)\b|error:|fatal|cannot|can't|not available|No such", re.IGNORECASE
)
_READ_BYTES: Final = 262_144
_MAX_MESSAGE: Final = 2000
_KILLED: Final = 128 + signal.SIGKILL


@dataclass(frozen=True)
class Outcome:
    """The final state of a run and the reason for it."""

    state: RunState
    message: str | None = None
    lines: tuple[str, ...] = ()
    end_cause: Literal["time_limit"] | None = None

    @property
    def listed(self) -> str:
        """Return the log lines as text to append to a sentence, so that each is printed on a separate line."""
        return "".join(f"\n    {line}" for line in self.lines)

    def patch(self, run: Run, holder: str) -> RunPatch:
        """Return the patch that reports this outcome of `run` to the service."""
        text = self.message if not self.lines else f"{self.message} Last lines: {' | '.join(self.lines)}"
        return RunPatch(
            state=self.state,
            message=None if text is None else text[:_MAX_MESSAGE],
            failed_local_batch_size=run.configuration.local_batch_size if self.state == "out_of_memory" else None,
            holder=holder,
            end_cause=self.end_cause,
        )


def judge(run: Run, status: int, lines: list[str], *, timed_out_after_s: float | None = None) -> Outcome:
    """Return the outcome of `run`, given its exit `status` and the last `lines` of its log.

    `run` must be up to date with the service. A run that was cancelled by a user or at its limits stays
    cancelled, however its command ended. A profiling run stays a success if its agent reported enough measurements.
    A failure that the agent reported is kept, because the agent saw the cause inside the process.

    Otherwise, status 0 with samples is a success, but a profiling run must also have used the planned configuration. A
    run is out of memory if its status is 137 (SIGKILL, which the kernel sends when memory runs out) or if an
    out-of-memory exception ended a rank. Everything else is a failure. A training run that sent no samples, or
    that used another configuration, still succeeds, but its outcome has a message.
    """
    if (reported := _reported(run)) is not None:
        return reported
    if timed_out_after_s is not None:
        return Outcome(
            "failed",
            f"The run did not finish within its time limit of {timed_out_after_s:g} s and was stopped. Its log "
            "contains the stack of each rank on this machine. Increase --time-limit if the run was merely slow.",
        )
    if run.state == "out_of_memory" or status == _KILLED or (status != 0 and ran_out_of_memory(lines)):
        batch = run.configuration.local_batch_size
        return Outcome("out_of_memory", run.message or f"The run ran out of memory at a local batch of {batch}.")
    if status != 0:
        return Outcome("failed", f"The command ended with exit code {status}.", tuple(relevant_lines(lines)))
    if run.state == "failed" and run.configuration_mismatch is None:
        return Outcome("failed", run.message or "The agent reported a failure.", tuple(relevant_lines(lines)))
    if run.configuration_mismatch is not None:
        return Outcome("failed" if run.kind == "profile" else "succeeded", _kept(run))
    if run.num_samples:
        return Outcome("succeeded")
    if run.kind == "profile":
        return Outcome("failed", f"The command succeeded but no measurement arrived: {EMBED}")
    silent = "The training succeeded but no measurement arrived, so the prediction cannot be checked:"
    return Outcome("succeeded", f"{silent} {EMBED}")


def _reported(run: Run) -> Outcome | None:
    """Return the final outcome that a user or the agent has already reported, or None if there is none."""
    if run.state == "cancelled":
        return Outcome("cancelled", run.message or "The run was cancelled.")
    if run.kind == "profile" and run.state == "succeeded":
        return Outcome("succeeded", run.message)
    if run.kind == "profile" and run.state == "failed" and run.configuration_mismatch is not None:
        return Outcome("failed", _kept(run))
    return None


def _kept(run: Run) -> str:
    return f"{run.configuration_mismatch} The measurement is kept for the configuration that ran."


def tail(log: Path) -> list[str]:
    """Return the lines in the last 256 KiB of `log`, or an empty list if the file cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _READ_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def ran_out_of_memory(lines: list[str]) -> bool:
    """Return True if a rank's exception was about memory, or if a launcher reported that the kernel killed the rank.

    Only the exception in the rank's last traceback, or an exception that caused it (`raise ... from`), is considered:
    the same text in an option, a warning or a caught exception does not show how the rank ended.
    """
    ranks: dict[str, _LastException] = {}
    status = None
    for line in lines:
        rank = _RANK.match(line)
        text = line[rank.end() :] if rank else line
        if _KILLED_OR_ABORTED.search(text):
            return True
        if match := _TORCHRUN_STATUS.match(text):
            status = int(match[1])  # torchrun prints the status of the root cause last
        ranks.setdefault(rank[2] if rank else "", _LastException()).read(text)
    return status in (-signal.SIGKILL, _KILLED) or any(last.of_memory for last in ranks.values())


@dataclass
class _LastException:
    """Parses the output of one process; `of_memory` is True if the exception in its last traceback was about memory."""

    of_memory: bool = False
    _in_traceback: bool = False
    _from_above: bool = False

    def read(self, line: str) -> None:
        if _TRACEBACK in line:
            self._in_traceback = True
        elif line.startswith(_CAUSE):
            self._from_above = True
        elif self._in_traceback and line.strip() and line[0] not in " \t|│╭╰":  # not a frame, nor one of rich
            self._in_traceback = False
            if not _CONSEQUENCE.search(line):
                self.of_memory = bool(_MEMORY_EXCEPTION.search(line)) or (self._from_above and self.of_memory)
            self._from_above = False


def relevant_lines(lines: list[str], count: int = 4) -> list[str]:
    """Return the last lines that contain an error, or simply the last lines if no line contains an error.

    Stack frames and tables that the launcher printed are omitted.
    """
    own = [
        f"{rank[1]} {text}" if (rank := _RANK.match(line)) else text
        for line in lines
        if (text := _RANK.sub("", line).rstrip()) and not _ELASTIC.search(text)
    ]
    errors = [line for line in own if _ERROR.search(line)]
    return list(dict.fromkeys(errors or own or [line.rstrip() for line in lines if line.strip()]))[-count:]


def agent_warnings(lines: list[str]) -> list[str]:
    """Return the agent's messages for the user, without prefixes and duplicates."""
    texts = (line.partition(AGENT_PREFIX)[2].strip() for line in lines if AGENT_PREFIX in line)
    return list(dict.fromkeys(text for text in texts if text))
