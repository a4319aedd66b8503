"""Reading a run's log: the last lines that matter, signs of out-of-memory, and what the agent said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

__all__ = ["AGENT_PREFIX", "agent_warnings", "ran_out_of_memory", "relevant_lines", "tail"]

AGENT_PREFIX: Final = "tula:"
"""The agent starts each line that it says to a person with this word."""

STACK_OF_RANK: Final = "stack of rank "
"""What follows it, and a number, is for whoever reads the log of a hang."""

_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|\bMemoryError\b|Unable to allocate .* for an array"
    r"|std::bad_alloc|Cannot allocate memory|oom[-_ ]kill|Out[- ]of[- ]memory|OUT_OF_ME(?:MORY)?\b"
    r"|exitcode\s*:\s*(?:-9|137)\b|signal 9 \(SIGKILL\)|exit code:? 137|died with <Signals.SIGKILL",
    re.IGNORECASE,
)
_ELASTIC = re.compile(
    r"torch/distributed/(?:elastic|run|launcher)|multiprocessing/api|torch\.distributed\.elastic|ChildFailedError"
    r"|^=+$|^-+$|^Failures:|^\s*<NO_OTHER_FAILURES>|error_file|traceback : |Root Cause|^\[\d\]:"
    r"|^\s+(?:time|host|rank|exitcode)\s+:|^[WEI]\d{4} |^Traceback \(most recent call last\):$|^\s{2,}"
    r"|^srun: error: \S+: tasks? |^slurmstepd: |^\s*\^+\s*$"
)
_ERROR = re.compile(
    r"\b\w*(?:Error|Exception|Exit|Interrupt)\b|error:|fatal|cannot|can't|not available|No such", re.IGNORECASE
)
_READ_BYTES: Final = 262_144


def tail(log: Path) -> list[str]:
    """The last lines of `log` (at most 256 KiB of it); empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _READ_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def ran_out_of_memory(lines: list[str]) -> bool:
    """True when a line names an out-of-memory of device or host in one of the usual wordings."""
    return any(_OUT_OF_MEMORY.search(line) for line in lines)


def relevant_lines(lines: list[str], count: int = 4) -> list[str]:
    """The last lines that say what went wrong: errors first of all, without the launcher's own frames and tables."""
    own = [line.rstrip() for line in lines if line.strip() and not _ELASTIC.search(line)]
    errors = [line for line in own if _ERROR.search(line)]
    return list(dict.fromkeys(errors or own or [line.rstrip() for line in lines if line.strip()]))[-count:]


def agent_warnings(lines: list[str]) -> list[str]:
    """What the agent said about the run, without its prefix, each once."""
    said = (line.partition(AGENT_PREFIX)[2].strip() for line in lines if AGENT_PREFIX in line)
    return list(dict.fromkeys(text for text in said if text and not text.startswith(STACK_OF_RANK)))
