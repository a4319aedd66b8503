"""Starts Python programs in a fraction of a second by forking a parent process that has imported their modules.

The parent process runs this file as a program. Its arguments are the name of its socket and the modules to import. From
each line of a connection, it reads a JSON object with argv (a script, `-c` and a program text, or `-m` and a module,
followed by arguments), env, a working folder, files for stdout and stderr, files to open under further descriptors, the
interpreter for multiprocessing to start, and the process whose namespaces the program enters. It forks a child, and
replies with the path of a file, which is named after the child's process id. When the child ends, the parent writes its
exit status to this file. The child behaves like a process that `python ARGV` has started: it has a separate session,
environment and files, and the signals, `atexit` functions and exit status of the program. There are two differences.
After the `atexit` functions, the child skips the interpreter's clean-up, because freeing torch's modules would take
half a second of CPU time, which is more than most test programs take. The child also leaves a process group a little
later than its script asks (`leave_groups_late`), because with gloo the destructor of a DDP model holds the GIL and
waits for a thread that may need the GIL to free the last reduction. When a connection closes (also because the tests
were killed), the parent ends all children of this connection that still run. When no connection is left, the parent
itself ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import multiprocessing
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
import zlib
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
    "kneed",  # with most of SciPy, for the first recommendation
    "scipy.optimize",
    "psycopg",
    "tula_client.cli.app",
)
AGENT = (
    "httpcore",  # httpx imports it when it creates a client
    "httpx",
    "torch._dynamo",  # imported when an optimizer is created
    "torch.distributed.checkpoint._fsspec_filesystem",  # imported when a checkpoint is written
    "torch.distributed.checkpoint.state_dict_saver",  # for sharded checkpoints and models
    "torch.distributed.fsdp",
    "torch.utils.data",
    "tula_wire",  # building its models takes longer than a training run of the tests
    "torch.utils.flop_counter",  # used by the agent
)
FRAMEWORKS = ("lightning.pytorch", "accelerate", "transformers.trainer", "transformers.models.bert.modeling_bert")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGUSR1)
"""The signals that a process passes on to the process that it represents."""
PR_SET_PDEATHSIG = 1
"""See prctl(2)."""
ABOVE_ALL = 512
"""The first file descriptor that no forked program uses."""
GLOO_RELEASE_S = 0.1
"""Seconds that gloo's threads need to free the last reduction if other programs use the same cores."""
UNUSED_S = 60.0
"""Seconds until a parent ends if the process that has started it does not connect."""
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL for children that still run when their connection closes."""


class ForkedProcess:
    """A forked process, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int, status: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit status as `subprocess` encodes it, or None while the process runs."""
        if self.returncode is None and self._status.exists() and (text := self._status.read_text()):
            self.returncode = os.waitstatus_to_exitcode(int(text))
            self._status.unlink()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends, and return its exit status. Raises `subprocess.TimeoutExpired`."""
        ends = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the process has ended before its status is known
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """A parent process that has imported `modules`; it ends when `close` is called or this process ends.

    `python` is the interpreter that starts the parent. If `python` is a program that forks a process with these
    modules, the parent need not import them again. A `shared` parent is used by all workers of pytest-xdist, so that it
    imports the modules only once.
    """

    def __init__(self, modules: Sequence[str], python: str = sys.executable, *, shared: bool = False) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID") if shared else None
        self._name = f"\0tula-forks-{run or uuid.uuid4().hex}-{zlib.crc32(repr((modules, python)).encode())}"
        self._command = [python, __file__, self._name[1:], *modules]
        self._one_at_a_time = threading.Lock()
        self._link = self._connect()

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
        beside: int = 0,
    ) -> ForkedProcess:
        """Fork `python ARGV` in `folder`; append its output to `stdout` and `stderr`, or all of it to `stdout` if there
        is no `stderr`.

        `inherited` maps the descriptors of further open files to their paths below /proc; `spawns` is the interpreter
        that multiprocessing starts in the program; `beside` is a process whose namespaces the program enters.
        """
        order: dict[str, Any] = {"argv": list(argv), "env": env, "stdout": str(stdout), "stderr": str(stderr or stdout)}
        order |= {"folder": str(Path(folder).absolute()), "inherited": inherited or {}, "beside": beside}
        order["spawns"] = str(spawns or sys.executable)
        with self._one_at_a_time:
            if not (answer := self._ask(json.dumps(order))):
                self._link = self._connect()  # the last parent ended while this process connected
                answer = self._ask(json.dumps(order))
        if not answer:
            raise RuntimeError("the fork server has ended")
        status = Path(answer)
        return ForkedProcess(int(status.name), status)

    def close(self) -> None:
        """End all children that still run, and also the parent unless other processes use it."""
        self._link.shutdown(socket.SHUT_WR)
        self._link.settimeout(3 * GRACE_S)
        with suppress(OSError):  # the parent has ended, or still imports
            self._link.recv(1)
        self._link.close()

    def _ask(self, order: str) -> str:
        """Return the parent's reply, or an empty reply if the parent has ended."""
        with suppress(ConnectionError), self._link.makefile("rw") as lines:
            lines.write(order + "\n")
            lines.flush()
            return lines.readline().rstrip("\n")
        return ""

    def _connect(self) -> socket.socket:
        """Connect to the parent, and start it first if it is not running."""
        parent = None
        while True:
            link = socket.socket(socket.AF_UNIX)
            with suppress(ConnectionRefusedError):
                link.connect(self._name)
                return link
            link.close()
            if parent is None:
                quiet = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1)]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                parent = os.posix_spawn(self._command[0], self._command, environment, file_actions=quiet)
            elif os.waitpid(parent, os.WNOHANG)[1]:
                raise RuntimeError("the fork server cannot start")
            time.sleep(0.01)


_program: dict[str, Any] = {}
"""The globals of the program that runs in this fork."""
_status: int | None = None
"""The exit status of the program in this fork; None while the program runs, and in the parent."""


def leave() -> None:
    """End a forked program without freeing its modules; this is the last `atexit` function to be called."""
    if _status is not None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the reader has gone, or the program has closed the stream
                stream.flush()
        os._exit(_status)


class Children:
    """The processes that the parent has forked, whose exit statuses are written to files in a folder.

    `ended` becomes readable when a process ends. The signal alone is not enough, because it does not interrupt a
    blocking call if it arrives just before the call.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: set[int] = set()
        self.ended, self._wakes = os.pipe()
        for descriptor in (self.ended, self._wakes):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and then the input ends

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
            (self._folder / str(pid)).unlink(missing_ok=True)  # left by an earlier process with this id
        return pid

    def keep_statuses(self) -> None:
        """Write the exit statuses of the processes that have ended."""
        with suppress(BlockingIOError):
            os.read(self.ended, 4096)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                draft = self._folder / f"{ended[0]}.draft"
                draft.write_text(str(ended[1]))
                draft.rename(self._folder / str(ended[0]))
                self._running.discard(ended[0])

    def end(self, pids: set[int]) -> None:
        """End the given processes if they still run, with SIGTERM and then with SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            ends = time.monotonic() + GRACE_S
            for pid in pids & self._running:
                with suppress(ProcessLookupError):
                    os.killpg(pid, number)
            while pids & self._running and time.monotonic() < ends:
                time.sleep(0.01)
                self.keep_statuses()


def serve_forks(name: str, modules: Sequence[str]) -> None:
    """Fork a program for each line of each connection, until no connection is open."""
    listening = listen(name)
    load(modules)
    folder = Path(tempfile.mkdtemp(prefix="tula-forks-"))
    children = Children(folder)
    links: dict[socket.socket, set[int]] = {}
    listening.settimeout(0)
    while True:
        watched: list[Any] = [listening, children.ended, *links]
        ready, _, _ = select.select(watched, [], [], None if links else UNUSED_S)
        children.keep_statuses()
        with suppress(BlockingIOError):
            links[listening.accept()[0]] = set()
        for link in [link for link in links if link in ready]:
            if line := read_line(link):
                pid = children.fork()
                if pid == 0:
                    for held in (listening, *links):
                        held.close()
                    become(json.loads(line))
                    return
                for pids in links.values():
                    pids.discard(pid)  # of a process that has ended
                links[link].add(pid)
                with suppress(ConnectionError):
                    link.sendall(f"{folder / str(pid)}\n".encode())
            else:
                children.end(links.pop(link))
                if links:  # else it closes when the folder has been removed, for which `ForkServer.close` waits
                    link.close()
        if not links:
            break
    listening.close()
    shutil.rmtree(folder)


def load(modules: Sequence[str]) -> None:
    """Import the modules, and do once in the parent what each child would otherwise repeat."""
    for module in modules:
        importlib.import_module(module)
    know_files()
    for finalizer in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        finalizer.atexit = False  # each child would unregister torch's 174 libraries, which takes 0.03 s of CPU time
    gc.collect()
    gc.freeze()  # the child's collector then visits no page, and copies none


def listen(name: str) -> socket.socket:
    """Return this parent's socket; end this process if another parent already has the socket."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(f"\0{name}")
    except OSError:
        sys.exit()
    listening.listen(64)
    return listening


def read_line(link: socket.socket) -> bytes:
    """Return the next line of a connection, or an empty line if the connection has closed."""
    line = b""
    with suppress(ConnectionError):
        while not line.endswith(b"\n") and (part := link.recv(2**16)):
            line += part
    return line


def know_files() -> None:
    """Record each file's module in the cache of `inspect`, since torchrun inspects its stack at each change of state.

    For each frame of an unknown file, `inspect` searches all modules, which takes 0.6 s of CPU time in each torchrun.
    """
    inspect.getmodule(know_files.__code__, "no file")  # which searches all, and remembers them
    inspect.modulesbyfile |= {"<frozen runpy>": "runpy", "<string>": "__main__", __file__: "__main__"}


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
    if order["beside"]:
        enter_namespaces(order["beside"])
    multiprocessing.set_executable(order["spawns"])
    leave_groups_late()
    os.chdir(order["folder"])
    sys.stdout.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    is_module, is_text = (order["argv"][0] == flag for flag in ("-m", "-c"))
    sys.argv = order["argv"][is_module:]
    search = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = ["" if is_module or is_text else str(Path(sys.argv[0]).parent), *search]
    # The globals are kept until the interpreter ends, as for a script.
    global _program, _status
    try:
        if is_module:
            _program = runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif is_text:
            _program = {"__name__": "__main__"}
            exec(compile(sys.argv.pop(1), "<string>", "exec"), _program)
        else:
            _program = runpy.run_path(sys.argv[0], run_name="__main__")
    except KeyboardInterrupt:  # the interpreter then ends itself with SIGINT
        raise
    except BaseException as error:  # the interpreter then prints the error
        _status = exit_status(error)
        raise
    _status = 0


def leave_groups_late() -> None:
    """Make scripts wait until gloo frees the last reduction before they destroy a group (see `gloo.leave_group`)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None:
        return
    destroy = distributed.destroy_process_group

    def destroy_late(*args: Any, **kwargs: Any) -> None:
        time.sleep(GLOO_RELEASE_S)
        destroy(*args, **kwargs)

    distributed.destroy_process_group = destroy_late  # type: ignore[attr-defined]


def exit_status(error: BaseException) -> int:
    """Return the exit status with which the interpreter would end if nothing caught `error`."""
    if not isinstance(error, SystemExit):
        return 1
    return 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1


def inherit(paths: Mapping[str, str]) -> None:
    """Open the given files below /proc in their current modes, each under the descriptor that maps to it."""
    opened: dict[int, int] = {}
    for descriptor, path in paths.items():
        (flags,) = re.findall(r"^flags:\s+(\d+)", Path(path.replace("/fd/", "/fdinfo/")).read_text(), re.MULTILINE)
        mode = int(flags, 8) & os.O_ACCMODE
        opened[int(descriptor)] = fcntl.fcntl(os.open(path, mode | os.O_NONBLOCK), fcntl.F_DUPFD, ABOVE_ALL)
        fcntl.fcntl(opened[int(descriptor)], fcntl.F_SETFL, 0)  # only opening a pipe may not block
    for number, file in opened.items():
        os.dup2(file, number)
        os.close(file)


def set_namespace(file: int, kind: int, name: str) -> None:
    """Move this process into a namespace of the given kind, to which an open file refers (see setns(2)).

    Raises OSError with the name if it cannot enter the namespace.
    """
    if ctypes.CDLL(None, use_errno=True).setns(file, kind) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {name}")


def enter_namespaces(pid: int) -> None:
    """If process `pid` is in other namespaces than this process, fork a child that continues in those namespaces.

    The child then has the network, host name, mounts and process ids of that process's machine in a cluster. This
    process only represents the child: it forwards signals, and ends as the child does.
    """
    theirs, ours = Path(f"/proc/{pid}/ns"), Path("/proc/self/ns")
    kinds = [kind for kind in ("net", "uts", "pid", "mnt") if (theirs / kind).readlink() != (ours / kind).readlink()]
    files = [os.open(theirs / kind, os.O_RDONLY) for kind in kinds]
    if not files:
        return
    for file in files:
        set_namespace(file, 0, f"the namespaces of process {pid}")
        os.close(file)
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        return
    for number in PASSED_ON:
        signal.signal(number, lambda received, _: os.kill(child, received))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    atexit.register(leave)  # registered first, so called last
    serve_forks(sys.argv[1], sys.argv[2:])
