"""Runs the `tula` command as a user does, on a small job that can be made to fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.support import clean_environment
from benchmarks.support.forked import Server
from tests.support.forked_commands import launchers
from tula_client import Client
from tula_client._spec import load_spec
from tula_wire import Run

SCRIPT = str(Path(__file__).parent / "scripts" / "mishaps.py")
HANGS = str(Path(SCRIPT).with_name("hangs.py"))
FOLDER = Path(sys.executable).parent
TORCHRUN = ["--", "torchrun", "--standalone", "--nproc-per-node={world_size}", SCRIPT]
ONE_RANK = ["RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=0"]
ALONE = ["--", "env", *ONE_RANK, "python", SCRIPT]
"""Words that run the script as the only rank, with a third of the imports of two ranks under torchrun."""
STAND_IN = str(Path(__file__).parents[1] / "support" / "stand_in.py")
BATCH = ["--batch-size={local_batch_size}"]
SPEC = """
name = "{name}"
search = "{search}"
objective = "time"
epochs = 1
model = {{ name = "linear" }}
dataset = {{ size = {dataset} }}
cluster = {{ min_nodes = {least_nodes}, max_nodes = {nodes}, ranks_per_node = {ranks} }}
[batch]
min_local_batch_size = {least_batch}
max_local_batch_size = {batch}
[profiling]
profiling_warmup_steps = 2
measuring_steps = {steps}
"""


def obey_ctrl_c() -> None:
    """Let SIGINT end a child process; a shell that runs the tests in the background makes children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


started: list[subprocess.Popen[str]] = []
"""Processes that must be ended after a test."""


class Tula:
    """The `tula` command as a user runs it in a separate folder.

    With `forked`, the command and the processes that it launches are forked from a process that has imported torch;
    this suits tests that check neither how these processes start nor whether any of them is left. The method `start`
    never forks the command, so that a test can send it a signal.
    """

    def __init__(self, server: Server | Client, folder: Path, *, forked: bool = False, **environment: str) -> None:
        path = os.pathsep.join([*([str(launchers())] if forked else []), str(FOLDER), os.environ["PATH"]])
        if forked:
            environment.setdefault("PYTHON_EXEC", str(launchers() / "python"))
        self.environment = clean_environment(TULA_URL=server.url, PATH=path) | environment
        self.folder = folder
        self.called = (launchers() if forked else FOLDER) / "tula"

    def spec(
        self,
        name: str,
        *,
        nodes: int = 2,
        least_nodes: int | None = None,
        ranks: int = 1,
        batch: int = 8,
        least_batch: int | None = None,
        steps: int = 8,
        dataset: int = 1000,
        search: str = "partial",
    ) -> str:
        """Write a job.toml, with one candidate unless `least_nodes` or `least_batch` is given; return its path."""
        path = self.folder / "job.toml"
        path.write_text(
            SPEC.format(
                name=name,
                nodes=nodes,
                least_nodes=least_nodes or nodes,
                ranks=ranks,
                batch=batch,
                least_batch=least_batch or batch,
                steps=steps,
                dataset=dataset,
                search=search,
            )
        )
        return str(path)

    def client(self) -> Client:
        """Return a client of the service, with the user's token if there is one."""
        return Client(self.environment["TULA_URL"], token=self.environment.get("TULA_TOKEN", ""))

    def register(self, name: str, **options: int) -> None:
        """Register the job without measuring it, so that its only candidate is predicted by the prior."""
        with self.client() as client:
            client.register(load_spec(Path(self.spec(name, **options))))

    def start(self, *words: str, program: Path = FOLDER / "tula") -> subprocess.Popen[str]:
        """Start the command in a separate session."""
        process = subprocess.Popen(
            [str(program), *words],
            env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, preexec_fn=obey_ctrl_c,
        )  # fmt: skip
        started.append(process)
        return process

    def __call__(self, *words: str, fails: bool = False) -> tuple[Any, str]:
        """Run the command until it ends; return its JSON and its standard error."""
        words = _with_json(words) if "--" in words else (*words, "--json")
        process = self.start(*words, program=self.called)
        out, error = process.communicate(timeout=200)
        assert (process.returncode != 0) == fails, out + error
        return json.loads(out) if out else None, error

    def runs(self, name: str) -> list[Run]:
        """Return all runs of a job, oldest first."""
        with self.client() as client:
            return sorted(client.handle(name).runs(), key=lambda run: run.created_at)

    def processes(self, script: str = SCRIPT) -> list[int]:
        """Return the ids of the processes that run the script and report to the service of this test."""
        service = f"TULA_URL={self.environment['TULA_URL']}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and script.encode() in (entry / "cmdline").read_bytes():
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    found += [int(entry.name)] if service in variables else []
        return found

    def logs(self) -> str:
        """Return everything that the launched commands have printed."""
        return "\n".join(log.read_text() for log in sorted(self.folder.glob(".tula/*/logs/*.log")))


def _with_json(words: tuple[str, ...]) -> tuple[str, ...]:
    at = words.index("--")
    return (*words[:at], "--json", *words[at:])


def wait_until(holds: Callable[[], Any], within_s: float = 100.0) -> None:
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.1)
