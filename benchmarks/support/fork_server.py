"""Starts Python programs in a fraction of a second: a parent that has imported what they import forks them.

Run as a program, it is that parent. Its arguments are a folder and the modules to import. It reads one JSON object a
line: argv (a script, `-c` and its text, or `-m` and a module, then arguments), env, a working folder, files for stdout
and stderr, files to open under further descriptors, and the interpreter that multiprocessing is to start.
For each it answers the process id in a line. When a child ends, its exit status goes into the file `<pid>` of the
folder. The child is what `python ARGV` would have started: a process with a separate session, environment and files,
whose signals, `atexit` functions and exit status are the program's. Left out is what follows the `atexit` functions: to
take apart all modules of torch, page by copied page, costs half a second of CPU, more than most programs of the tests.
The child also leaves a process group a little later than its script asks (`leave_groups_late`): with gloo, the
destructor of a DDP model holds the GIL and waits for a thread that may need the GIL to free the last reduction. When
the input ends, as it does when the tests are killed, the parent ends the children that still run.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SERVICE = (
    "tula_service.app",
    "tula_service.cli",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
    "altair",
    "kneed",  # with most of SciPy, for the first answer
    "scipy.optimize",
    "psycopg",
    "tula_client.cli.app",
)
AGENT = (
    "httpcore",  # what httpx imports when a client is made
    "httpx",
    "torch._dynamo",  # what an optimizer imports when it is made
    "torch.distributed.checkpoint.state_dict_saver",  # what a sharded checkpoint and a sharded model take
    "torch.distributed.fsdp",
    "torch.utils.data",
    "tula_wire",  # models take longer to build than a training of the tests to run
    "torch.utils.flop_counter",  # what the agent takes of torch
)
FRAMEWORKS = ("lightning.pytorch", "accelerate", "transformers.trainer", "transformers.models.bert.modeling_bert")
ABOVE_ALL = 512
"""First descriptor that no forked program uses."""
GLOO_RELEASE_S = 0.1
"""Seconds in which gloo's threads free the last reduction, on cores that other programs share."""
GRACE_S = 5.0
"""Seconds from SIGTERM to SIGKILL for children that outlive the input."""


class ForkedProcess:
    """A forked process, with the part of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int, status: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit status as `subprocess` has it; None while the process runs."""
        if self.returncode is None and self._status.exists() and (text := self._status.read_text()):
            self.returncode = os.waitstatus_to_exitcode(int(text))
            self._status.unlink()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `subprocess.TimeoutExpired`."""
        ends = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended, which `poll` learns a moment later
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """The parent process, which has imported `modules`; ends with `close` or with this process.

    `python` starts it: one that forks a process with these imports saves them.
    """

    def __init__(self, modules: Sequence[str], python: str = sys.executable) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tula-forks-")
        self._one_at_a_time = threading.Lock()
        self._parent = subprocess.Popen(
            [python, __file__, self._folder.name, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def start(
        self,
        argv: Sequence[str],
        env: dict[str, str],
        stdout: Path | str,
        stderr: Path | str | None = None,
        *,
        folder: Path | str = ".",
        inherited: Mapping[int, str] | None = None,
        spawns: Path | None = None,
    ) -> ForkedProcess:
        """Fork `python ARGV` in `folder`; it appends its output to these files, without `stderr` all to the first.

        `inherited` are the paths below /proc of further open files by descriptor; `spawns` is the interpreter that
        multiprocessing starts in it.
        """
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        order: dict[str, Any] = {"argv": list(argv), "env": env, "stdout": str(stdout), "stderr": str(stderr or stdout)}
        order |= {"folder": str(folder), "inherited": inherited or {}, "spawns": str(spawns or sys.executable)}
        with self._one_at_a_time:
            self._parent.stdin.write(json.dumps(order) + "\n")
            self._parent.stdin.flush()
            pid = int(self._parent.stdout.readline())
        return ForkedProcess(pid, Path(self._folder.name) / str(pid))

    def close(self) -> None:
        """End the parent, and children that still run."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait(3 * GRACE_S)
        self._parent.stdout.close()
        self._folder.cleanup()


_program: dict[str, Any] = {}
"""Globals of the program that this fork has become."""
_status: int | None = None
"""Exit status of that program; None while it runs, and in the parent."""


def leave() -> None:
    """Leave a forked program, after its threads and its `atexit` functions, without taking its modules apart."""
    if _status is not None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads on, or the program has closed it
                stream.flush()
        os._exit(_status)


class Children:
    """The processes that the parent has forked, whose exit statuses go into files of a folder.

    `ended` becomes readable when one ends: a signal that comes between a handler's return and the next blocking call
    would not interrupt that call.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: set[int] = set()
        self.ended, self._wakes = os.pipe()
        for descriptor in (self.ended, self._wakes):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, whereupon the input ends

    def fork(self) -> int:
        """Fork, and return the process id, or 0 in the child, as `os.fork` does."""
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.set_wakeup_fd(-1)
            os.close(self.ended)
            os.close(self._wakes)
        else:
            self._running.add(pid)
            (self._folder / str(pid)).unlink(missing_ok=True)  # of an earlier process, for which nobody has waited
        return pid

    def keep_statuses(self) -> None:
        """Write the statuses of the processes that have ended."""
        with suppress(BlockingIOError):
            os.read(self.ended, 4096)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                draft = self._folder / f"{ended[0]}.draft"
                with suppress(FileNotFoundError):  # the folder is gone with the tests
                    draft.write_text(str(ended[1]))
                    draft.rename(self._folder / str(ended[0]))
                self._running.discard(ended[0])

    def end(self) -> None:
        """End the processes that still run: SIGTERM, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            ends = time.monotonic() + GRACE_S
            for pid in list(self._running):
                with suppress(ProcessLookupError):
                    os.killpg(pid, number)
            while self._running and time.monotonic() < ends:
                time.sleep(0.01)
                self.keep_statuses()


def serve_forks(folder: Path, modules: Sequence[str]) -> None:
    """Fork a program for each line of standard input, until it ends."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child does not copy pages that its collector never visits
    children = Children(folder)
    while True:
        ready, _, _ = select.select([sys.stdin, children.ended], [], [])
        children.keep_statuses()
        if sys.stdin not in ready:
            continue
        if not (line := sys.stdin.readline()):  # one at a time: the next is written after the answer to this one
            break
        order = json.loads(line)
        pid = children.fork()
        if pid == 0:
            become(order)
            return
        with suppress(BrokenPipeError):
            print(pid, flush=True)
    children.end()


def become(order: dict[str, Any]) -> None:
    """Turn this fork into `python ARGV`."""
    os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [os.open(os.devnull, os.O_RDWR), os.open(order["stdout"], flags), os.open(order["stderr"], flags)]
    for target, descriptor in enumerate(files):
        os.dup2(descriptor, target)
    inherit(order["inherited"])
    multiprocessing.set_executable(order["spawns"])
    leave_groups_late()
    os.chdir(order["folder"])
    sys.stdout.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    is_module, is_text = (order["argv"][0] == flag for flag in ("-m", "-c"))
    sys.argv = order["argv"][is_module:]
    search = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = ["" if is_module or is_text else str(Path(sys.argv[0]).parent), *search]
    # Kept until the interpreter ends, as a script's globals are.
    global _program, _status
    try:
        if is_module:
            _program = runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif is_text:
            _program = {"__name__": "__main__"}
            exec(compile(sys.argv.pop(1), "<string>", "exec"), _program)
        else:
            _program = runpy.run_path(sys.argv[0], run_name="__main__")
    except KeyboardInterrupt:  # the interpreter ends itself by SIGINT
        raise
    except BaseException as error:  # the interpreter prints what it says
        _status = exit_status(error)
        raise
    _status = 0


def leave_groups_late() -> None:
    """Let gloo's threads free the last reduction before a script destroys its group, as `gloo.leave_group` does."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None:
        return
    destroy = distributed.destroy_process_group

    def destroy_late(*args: Any, **kwargs: Any) -> None:
        time.sleep(GLOO_RELEASE_S)
        destroy(*args, **kwargs)

    distributed.destroy_process_group = destroy_late  # type: ignore[attr-defined]


def exit_status(error: BaseException) -> int:
    """Return the interpreter's exit status if nothing catches `error`."""
    if not isinstance(error, SystemExit):
        return 1
    return 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1


def inherit(paths: Mapping[str, str]) -> None:
    """Open these files below /proc, as they are open there, under the descriptors that name them."""
    opened: dict[int, int] = {}
    for descriptor, path in paths.items():
        (flags,) = re.findall(r"^flags:\s+(\d+)", Path(path.replace("/fd/", "/fdinfo/")).read_text(), re.MULTILINE)
        mode = int(flags, 8) & os.O_ACCMODE
        opened[int(descriptor)] = fcntl.fcntl(os.open(path, mode | os.O_NONBLOCK), fcntl.F_DUPFD, ABOVE_ALL)
        fcntl.fcntl(opened[int(descriptor)], fcntl.F_SETFL, 0)  # a pipe without another end would have blocked
    for number, file in opened.items():
        os.dup2(file, number)
        os.close(file)


if __name__ == "__main__":
    atexit.register(leave)  # before all others, and so called after them
    serve_forks(Path(sys.argv[1]), sys.argv[2:])
