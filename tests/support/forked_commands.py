"""`python`, `torchrun` and `tula` for tests whose claim is not how an interpreter starts: what they run is forked.

`launchers` is a folder with the three, to put first in a PATH; torchrun itself takes another interpreter for its ranks
from PYTHON_EXEC. Each program stands for the forked process as long as that runs: it gives it its output, working
directory and environment, forwards signals, and ends as it ended. When the program is killed, so is that process.
"""

from __future__ import annotations

import atexit
import functools
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

from benchmarks.support.fork_server import AGENT, ForkedProcess, ForkServer

__all__ = ["launchers"]

LAUNCHED = ("torch.distributed.run", "sklearn.datasets", "tula_client.cli.app")
"""What torchrun imports, the example that it starts, and `tula`."""
LOOK_EVERY_S = 0.02

PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys

words = {words} + [word for word in sys.argv[1:] if word != "-u"]
with socket.socket(socket.AF_UNIX) as link:
    link.connect({address})
    order = dict(pid=os.getpid(), argv=words, env=dict(os.environ), folder=os.getcwd())
    link.sendall(json.dumps(order).encode() + b"\\n")
    with link.makefile() as answers:
        pid = int(answers.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGUSR1):
            signal.signal(number, lambda received, _: os.kill(pid, received))
        status = int(answers.readline())
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@functools.cache
def fork_server() -> ForkServer:
    """Return one fork server for all tests of this process, since importing torch takes seconds."""
    made = ForkServer([*AGENT, *LAUNCHED])
    atexit.register(made.close)
    return made


@functools.cache
def launchers() -> Path:
    """Return the folder with the programs, served until this process ends."""
    return programs(
        fork_server(), {"python": [], "torchrun": ["-m", "torch.distributed.run"], "tula": ["-m", "tula_client.cli"]}
    )


def programs(forks: ForkServer, words_of: Mapping[str, Sequence[str]]) -> Path:
    """Make a folder with programs of these names that `forks` forks, each with its first words of `python WORDS...`."""
    folder = Path(tempfile.mkdtemp(prefix="tula-forked-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket"))
    listening.listen(64)
    for name, words in words_of.items():
        program = folder / name
        program.write_text(
            PROGRAM.format(python=sys.executable, words=list(words), address=repr(str(folder / "socket")))
        )
        program.chmod(0o755)
    threading.Thread(target=_serve, args=(listening, forks), daemon=True).start()
    return folder


def _serve(listening: socket.socket, forks: ForkServer) -> None:
    """Fork a process for each program that connects."""
    while True:
        link, _ = listening.accept()
        threading.Thread(target=_stand_for, args=(link, forks), daemon=True).start()


def _stand_for(link: socket.socket, forks: ForkServer) -> None:
    """Fork what one program asks for, and tell it the process id and the exit status."""
    with suppress(OSError), link, link.makefile("rw") as lines:
        order = json.loads(lines.readline())
        out, err = (f"/proc/{order['pid']}/fd/{descriptor}" for descriptor in (1, 2))
        process = forks.start(order["argv"], order["env"], out, err, folder=order["folder"])
        lines.write(f"{process.pid}\n")
        lines.flush()
        lines.write(f"{_wait(process, link)}\n")


def _wait(process: ForkedProcess, link: socket.socket) -> int:
    """Return the exit status of the process, which is killed when the program that stands for it is gone."""
    while (code := process.poll()) is None:
        if select.select([link], [], [], LOOK_EVERY_S)[0]:  # nothing more is sent: the link has ended
            process.send_signal(signal.SIGKILL)
            return process.wait(10)
    return code
