"""Runs a launched command as a child process, and ends it with all its descendants, even if `tula` is killed.

This module runs as a script and imports only the standard library. On Linux it registers as the reaper of orphaned
descendants (prctl PR_SET_CHILD_SUBREAPER), so that it can find ranks that torchrun moved to another session. Its
standard input is a pipe from `tula`. If the supervisor reads the byte `s`, it stops the command; if it reads `d`, it
first makes every rank print its stack. If `tula` dies, the pipe closes and the supervisor stops the command. The
supervisor exits with the status of the command, or with 128 + n for signal n.

Stopping begins at the top of the process tree. At first only the command receives SIGTERM, as under a kubelet, because
torchrun and srun forward the signal to ranks, and a rank that saves a checkpoint needs its data-loading processes. A
process whose parent has ended is signalled together with the command. After half of the grace period, all remaining
processes receive SIGTERM, and at the end of the grace period they receive SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_KILL_WITHIN_S = 5.0
_STOP_COMMAND_WITHIN_S = 30.0
_DUMP_WITHIN_S = 3.0
_LEFTOVER_GRACE_S = 2.0
_NOT_STARTED = 127


def main() -> int:
    """Run the command that follows the first argument, which is a JSON object with `grace_s` and `stop_command`."""
    options, command = json.loads(sys.argv[1]), sys.argv[2:]
    _become_subreaper()
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    stop_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: stop_signals.append(n))
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):  # these signals must not stop the command
        if signal.getsignal(number) is signal.SIG_DFL:  # a handler, because the command would inherit SIG_IGN
            signal.signal(number, lambda *_: None)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=True)
    except OSError as error:
        print(f"tula: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_STARTED
    while (status := _reap(child)) is None:
        if _asked_to_stop(wake) or stop_signals:
            _run_stop_command(options["stop_command"])
            status = _end_all(child, options["grace_s"])
            break
    _end_all(child, min(options["grace_s"], _LEFTOVER_GRACE_S))
    return status if status is not None else 128 + signal.SIGKILL


def _asked_to_stop(wake: int) -> bool:
    """Wait up to a second for a signal or a byte from `tula`; return True if `tula` asked to stop or has died."""
    ready, _, _ = select.select([0, wake], [], [], 1.0)
    if wake in ready:
        os.read(wake, 4096)
    if 0 not in ready:
        return False
    if b"d" in os.read(0, 16):
        _dump_stacks()
    return True


def _become_subreaper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap(child: subprocess.Popen[bytes]) -> int | None:
    """Reap the command and orphaned descendants; return the command's exit status, or None while it runs."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode is None:
        return None
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _descendants() -> list[int]:
    """Return the ids of all descendants of this process except zombies, parents first."""
    children = _children()
    pids = list(children.get(os.getpid(), []))
    for pid in pids:
        pids.extend(children.get(pid, []))
    return pids


def _children() -> dict[int, list[int]]:
    """Return the ids of all processes on this machine except zombies, grouped by the id of their parent."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    return children


def _left(child: subprocess.Popen[bytes], *, top: bool = False) -> list[int]:
    """Return the ids of descendants that are still running; if `top` is True, include only this process's children."""
    _reap(child)
    if sys.platform != "linux":
        return [child.pid] * (child.returncode is None)
    return _children().get(os.getpid(), []) if top else _descendants()


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _end_all(child: subprocess.Popen[bytes], grace_s: float) -> int | None:
    """Send SIGTERM to the command and later to all remaining processes, then SIGKILL; return the exit status."""
    began, told = time.monotonic(), set[int]()
    while (left := _left(child)) and (took_s := time.monotonic() - began) < grace_s + _KILL_WITHIN_S:
        if took_s >= grace_s:
            for pid in left:
                _kill(pid, signal.SIGKILL)
        else:
            for pid in left if took_s >= grace_s / 2 else _left(child, top=True):
                if pid not in told:
                    told.add(pid)
                    _kill(pid, signal.SIGTERM)
                    _kill(pid, signal.SIGCONT)
        time.sleep(0.03)
    return _reap(child)


def _run_stop_command(words: list[str] | None) -> None:
    """Run the stop command, if there is one, to cancel the cluster job that the command submitted."""
    if words:
        try:
            subprocess.run(words, stdin=subprocess.DEVNULL, timeout=_STOP_COMMAND_WITHIN_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"tula: the stop command {words[0]} failed: {error}", file=sys.stderr)


def _dump_stacks() -> None:
    """Make each rank on this machine print the stacks of all its threads, in order of rank.

    Ranks receive SIGABRT, because Python's faulthandler (enabled by PYTHONFAULTHANDLER=1) then prints the stacks
    without help from the script, even if the interpreter is stuck in a collective. SIGABRT ends the rank, which is
    about to be stopped anyway. All processes are suspended first, since otherwise the launcher and the other ranks
    would react as soon as the first rank ends.
    """
    below = _descendants()
    for pid in below:
        _kill(pid, signal.SIGSTOP)
    ranks: dict[int, int] = {}
    for pid in below:
        rank = _read_rank(pid)
        if rank is not None and _catches(pid, signal.SIGABRT):
            ranks.setdefault(rank, pid)  # data-loading processes have the same RANK, but come after their rank
    for rank, pid in sorted(ranks.items()):
        print(f"\nStack of rank {rank} (process {pid}) at its time limit:", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        _kill(pid, signal.SIGABRT)
        _kill(pid, signal.SIGCONT)
        until = time.monotonic() + _DUMP_WITHIN_S
        while time.monotonic() < until and pid in _descendants():
            time.sleep(0.01)
    if not ranks:
        print("tula: found no rank of this run on this machine, so there is no stack to print", file=sys.stderr)
    for pid in below:
        _kill(pid, signal.SIGCONT)


def _read_rank(pid: int) -> int | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    for entry in environment:
        if entry.startswith(b"RANK="):
            value = entry[5:]
            return int(value) if value.isdigit() else None
    return None


def _catches(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


if __name__ == "__main__":
    sys.exit(main())
