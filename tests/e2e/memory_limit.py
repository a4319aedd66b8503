"""Creates a control group with little memory, in which the kernel kills a process that takes more; needs root."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["limited", "why_not"]

_ROOT = Path("/sys/fs/cgroup")


def why_not() -> str | None:
    """Return in one sentence why this machine cannot limit memory by control groups, or None if it can."""
    try:
        with limited(64 * 2**20):
            return None
    except OSError as error:
        return f"this machine allows no control group with a memory limit ({error.strerror})"


@contextmanager
def limited(memory_bytes: int) -> Iterator[Path]:
    """Create a group and yield its folder; a process enters it by writing its id to `cgroup.procs`.

    Raises OSError if this machine does not permit such a group.
    """
    unified = (_ROOT / "cgroup.controllers").exists()
    group = (_ROOT if unified else _ROOT / "memory") / f"tula-test-{os.getpid()}-{time.monotonic_ns()}"
    if unified and "memory" not in (_ROOT / "cgroup.subtree_control").read_text().split():
        (_ROOT / "cgroup.subtree_control").write_text("+memory")
    group.mkdir()
    try:
        (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(memory_bytes))
        for swap, most in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", memory_bytes)):
            with contextlib.suppress(OSError):  # the file does not exist without swap accounting
                if (group / swap).exists():
                    (group / swap).write_text(str(most))
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a group once it is empty: it remains busy for a moment after its last process has ended."""
    until = time.monotonic() + 5
    while (group / "cgroup.procs").read_text() and time.monotonic() < until:
        time.sleep(0.01)
    group.rmdir()
