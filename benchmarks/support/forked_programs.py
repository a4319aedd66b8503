"""Creates programs that stand in for an interpreter: a `ForkServer` forks the process that they would start.

While the forked process runs, the program represents it: the process uses the program's output, working directory,
environment, namespaces and inherited files, and receives the program's signals. The program ends with the exit status
of the process. If the program is killed, the process is killed, too.
"""

from __future__ import annotations

import atexit
import json
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.support.fork_server import PASSED_ON, ForkedProcess, ForkServer

LOOK_EVERY_S = 0.02

PROGRAM = """#!{python} -IS
import itertools, json, os, signal, socket, stat, sys

def is_passed_on(descriptor):
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # the descriptor of the listing itself
        return False
    # Sockets and files without a type (eventfd, epoll) cannot be opened again, output files are passed separately, and
    # input is passed only from a pipe.
    reopened = stat.S_IFMT(mode) and not stat.S_ISSOCK(mode)
    return stat.S_ISFIFO(mode) if descriptor == 0 else descriptor > 2 and reopened

words = {words} + [*itertools.dropwhile(("-u", "-B").__contains__, sys.argv[1:])]
inherited = [*filter(is_passed_on, map(int, os.listdir("/proc/self/fd")))]
with socket.socket(socket.AF_UNIX) as link:
    link.connect({address})
    order = dict(argv=words, env=dict(os.environ), folder=os.getcwd(), inherited=inherited)
    link.sendall(json.dumps(order).encode() + b"\\n")
    with link.makefile() as answers:
        answers.readline()
        for number in {signals}:
            signal.signal(number, lambda received, _: link.send(bytes([received])))
        status = int(answers.readline())
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def programs(forks: ForkServer, words_of: Mapping[str, Sequence[str]], *, spawns: str | None = None) -> Path:
    """Create a folder with a program for each name in `words_of`; each program asks `forks` to fork `python WORDS...`.

    `spawns` is the name of the program that multiprocessing starts in these processes instead of the interpreter.
    Returns the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="tula-forked-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket"))
    listening.listen(64)
    for name, words in words_of.items():
        program = folder / name
        program.write_text(
            PROGRAM.format(
                python=sys.executable,
                words=list(words),
                address=repr(str(folder / "socket")),
                signals=[*map(int, PASSED_ON)],
            )
        )
        program.chmod(0o755)
    threading.Thread(
        target=_serve, args=(listening, forks, None if spawns is None else folder / spawns), daemon=True
    ).start()
    return folder


def _serve(listening: socket.socket, forks: ForkServer, spawns: Path | None) -> None:
    """Fork a process for each program that connects."""
    while True:
        link, _ = listening.accept()
        threading.Thread(target=_stand_for, args=(link, forks, spawns), daemon=True).start()


def _stand_for(link: socket.socket, forks: ForkServer, spawns: Path | None) -> None:
    """Fork the process that one program requests; report the process's start and exit status to the program."""
    with suppress(OSError), link, link.makefile("rw") as lines:
        order = json.loads(lines.readline())
        pid = int.from_bytes(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
        out, err = (f"/proc/{pid}/fd/{descriptor}" for descriptor in (1, 2))
        inherited = {descriptor: f"/proc/{pid}/fd/{descriptor}" for descriptor in order["inherited"]}
        process = forks.start(
            order["argv"], order["env"], out, err,
            folder=order["folder"], inherited=inherited, spawns=spawns, beside=pid,
        )  # fmt: skip
        lines.write("started\n")
        lines.flush()
        lines.write(f"{_wait(process, link)}\n")


def _wait(process: ForkedProcess, link: socket.socket) -> int:
    """Pass the program's signals on to the process; kill it if the program ends first; return the exit status."""
    while (code := process.poll()) is None:
        if select.select([link], [], [], LOOK_EVERY_S)[0]:
            if not (received := link.recv(1)):  # the program has ended, and so has its link
                process.send_signal(signal.SIGKILL)
                return process.wait(10)
            process.send_signal(received[0])
    return code
