"""From a job's spec to trained weights through what clusters do, with real processes under torchrun and SLURM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.memory_limit import limited
from tests.e2e.slurm import slurm
from tests.support.server import Server, serving
from tula_client import Client
from tula_client.launch import load_spec
from tula_wire import Run

SCRIPT = str(Path(__file__).parent / "scripts" / "mishaps.py")
HANGS = str(Path(SCRIPT).with_name("hangs.py"))
FOLDER = Path(sys.executable).parent
TORCHRUN = ["--", "torchrun", "--standalone", "--nproc-per-node={world_size}", SCRIPT]
BATCH = ["--batch-size={local_batch_size}"]
SPEC = """
name = "{name}"
search = "partial"
objective = "time"
epochs = 1
model = {{ name = "linear" }}
dataset = {{ size = 1000 }}
cluster = {{ min_nodes = {nodes}, max_nodes = {nodes}, ranks_per_node = {ranks} }}
batch = {{ min_local_batch_size = {batch}, max_local_batch_size = {batch}, max_grad_accum_steps = {accumulation} }}
profiling = {{ profiling_warmup_steps = 2, measuring_steps = {steps} }}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One service for all of these; each has a job of its own."""
    folder = tmp_path_factory.mktemp("service")
    with serving(f"sqlite:///{folder}/tula.db") as one:
        yield one


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What a failed test leaves behind is ended."""
    yield
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()


class Tula:
    """The command, as a person runs it in a folder of their own."""

    def __init__(self, server: Server, folder: Path, **environment: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
        path = f"{FOLDER}{os.pathsep}{clean['PATH']}"
        self.environment = {**clean, "TULA_URL": server.url, "OMP_NUM_THREADS": "1", "PATH": path, **environment}
        self.folder = folder

    def spec(
        self, name: str, *, nodes: int = 2, ranks: int = 1, batch: int = 8, steps: int = 8, accumulation: int = 1
    ) -> str:
        """Write a job of one candidate; its path."""
        path = self.folder / "job.toml"
        path.write_text(
            SPEC.format(name=name, nodes=nodes, ranks=ranks, batch=batch, steps=steps, accumulation=accumulation)
        )
        return str(path)

    def register(self, name: str, **options: int) -> None:
        """Make the job known without measuring it, to train with what the prior says of its one candidate."""
        with Client(self.environment["TULA_URL"], token="") as client:
            client.register(load_spec(Path(self.spec(name, **options))))

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start the command in a session of its own."""
        process = subprocess.Popen(
            [str(FOLDER / "tula"), *words],
            env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        _started.append(process)
        return process

    def __call__(self, *words: str, fails: bool = False) -> tuple[Any, str]:
        """Run it to its end; its JSON and what it said on standard error."""
        process = self.start(*words, "--json") if "--" not in words else self.start(*_with_json(words))
        out, error = process.communicate(timeout=200)
        assert (process.returncode != 0) == fails, out + error
        return json.loads(out) if out else None, error

    def runs(self, name: str) -> list[Run]:
        """All runs of a job, oldest first."""
        with Client(self.environment["TULA_URL"], token="") as client:
            return sorted(client.handle(name).runs(), key=lambda run: run.created_at)

    def logs(self) -> str:
        """Everything that commands have printed."""
        return "\n".join(log.read_text() for log in sorted(self.folder.glob(".tula/*/logs/*.log")))


def _with_json(words: tuple[str, ...]) -> list[str]:
    at = words.index("--")
    return [*words[:at], "--json", *words[at:]]


def processes_of(script: str) -> list[int]:
    """Every process whose command line names the script."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if script.encode() in line:
                found.append(int(entry.name))
    return found


def wait_until(holds: Callable[[], Any], within_s: float = 100.0) -> None:
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def test_kill_9_leaves_no_process_and_the_same_command_goes_on(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path)
    command = ["tune", tula.spec("killed"), *TORCHRUN, *BATCH, "--step-s=0.05", "--steps=200"]
    first = tula.start(*command)
    wait_until(lambda: "starts at step" in tula.logs())
    assert len(processes_of(SCRIPT)) >= 3  # two ranks and torchrun, at least
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait_until(lambda: not processes_of(SCRIPT), within_s=30)
    tuned, _ = tula(*command)
    assert [run.state for run in tula.runs("killed")] == ["succeeded"]
    assert tuned["recommendation"]["basis"] == "profiled"


def test_a_service_that_goes_away_and_comes_back_costs_nothing_measured(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/tula.db"
    with serving(database) as first:
        port, tula = first.port, Tula(first, tmp_path)
        tuning = tula.start("tune", tula.spec("away"), "--json", *TORCHRUN, *BATCH, "--step-s=0.05")
        wait_until(lambda: "starts at step" in tula.logs())
        first.kill()
    wait_until(lambda: not processes_of(f"-u\0{SCRIPT}"))  # the training went on, and ended, without the service
    with serving(database, port=port):
        out, said = tuning.communicate(timeout=150)
        assert tuning.returncode == 0, said
        (run,) = tula.runs("away")
        assert run.state == "succeeded"
        assert run.num_samples >= 8
        assert json.loads(out)["recommendation"]["basis"] == "profiled"


def test_a_hang_ends_at_the_time_limit_with_the_stack_of_each_rank(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path)
    hanging = [*TORCHRUN[:-1], HANGS]
    _, said = tula("tune", tula.spec("hangs"), "--time-limit=30", "--grace=2", *hanging, *BATCH, fails=True)
    assert "still going after its time limit of 30 s" in said
    log = tula.logs()
    assert "stack of rank 0" in log
    assert "stack of rank 1" in log
    assert log.count("in stuck_on_purpose") == 2
    assert [run.state for run in tula.runs("hangs")] == ["failed"]
    assert not processes_of(hanging[-1])


def test_out_of_memory_in_training_falls_back_from_the_last_checkpoint(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path)
    script = [*TORCHRUN, *BATCH, "--accumulate={grad_accum_steps}"]
    tula.register("shrinks", accumulation=2)
    trained, _ = tula("run", "shrinks", *script, "--fits=4")
    assert [one["state"] for one in trained["attempts"]] == ["out_of_memory", "succeeded"]
    before, after = (one["configuration"] for one in trained["attempts"])
    assert after["local_batch_size"] < before["local_batch_size"]
    assert (
        after["local_batch_size"] * after["grad_accum_steps"] == before["local_batch_size"] * before["grad_accum_steps"]
    )
    assert "starts at step 4" in tula.logs()
    failed = next(run for run in tula.runs("shrinks") if run.state == "out_of_memory")
    assert failed.configuration.local_batch_size == before["local_batch_size"]


@pytest.mark.cluster("memory")
def test_a_rank_that_the_kernel_kills_for_its_memory_falls_back_alike(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path)
    script = [*TORCHRUN, *BATCH, "--accumulate={grad_accum_steps}"]
    tula.register("killed-for-memory", accumulation=2)
    with limited(400 * 2**20) as group:
        trained, _ = tula("run", "killed-for-memory", *script, "--fits=4", f"--memory-group={group}")
    assert [one["state"] for one in trained["attempts"]] == ["out_of_memory", "succeeded"]
    before, after = (one["configuration"] for one in trained["attempts"])
    assert (before["local_batch_size"], after["local_batch_size"]) == (8, 4)
    assert after["grad_accum_steps"] == 2 * before["grad_accum_steps"]
    assert "starts at step 4" in tula.logs()
    assert not processes_of(SCRIPT)  # the rank that waited for the killed one went with it


def test_an_out_of_memory_that_the_script_catches_does_not_hang_the_other_rank(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path)
    began = time.monotonic()
    tuned, _ = tula("tune", tula.spec("catches", steps=200), *TORCHRUN, *BATCH, "--steps=400", "--fits=4", "--catch")
    assert [run.state for run in tula.runs("catches")] == ["out_of_memory"]
    assert tuned["runs"][0]["state"] == "out_of_memory"
    assert "rank 1 ran out of memory at a local batch of 8" in tula.logs()
    assert time.monotonic() - began < 120  # gloo would have waited 30 minutes


def test_a_script_that_ignores_its_batch_is_told_what_it_used_instead(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path)
    _, said = tula("tune", tula.spec("deaf", batch=8), *TORCHRUN, "--batch-size=6", fails=True)
    (run,) = tula.runs("deaf")
    assert f"Run {run.id} was to use local batch 8" in said
    assert "saw 6" in said
    assert (run.state, run.configuration.local_batch_size) == ("succeeded", 8)
    assert run.num_samples >= 8  # kept, as what it was


@pytest.fixture(scope="module")
def slurm_environment() -> Iterator[dict[str, str]]:
    """A real SLURM of one node."""
    with slurm() as environment:
        yield environment


@pytest.mark.cluster("slurm")
def test_slurm_starts_the_ranks_and_the_whole_job_is_one_command(
    server: Server, tmp_path: Path, slurm_environment: dict[str, str]
) -> None:
    tula = Tula(server, tmp_path, **slurm_environment)
    spec = tula.spec("on-slurm", nodes=1, ranks=2)
    tuned, _ = tula("tune", spec, "--then-run", "--launcher=slurm", "--", SCRIPT, *BATCH)
    assert tuned["trained"]["attempts"][-1]["state"] == "succeeded"
    profiled, trained = tula.runs("on-slurm")
    assert (profiled.state, trained.state) == ("succeeded", "succeeded")
    assert profiled.num_samples >= 8


@pytest.mark.cluster("slurm")
def test_ranks_that_no_signal_of_ours_reaches_show_their_stacks_by_themselves(
    server: Server, tmp_path: Path, slurm_environment: dict[str, str]
) -> None:
    tula = Tula(server, tmp_path, **slurm_environment)
    spec = tula.spec("hangs-elsewhere", nodes=1, ranks=2)
    hanging = [HANGS, "--with-agent", *BATCH]  # started by slurmd: as far from `tula` as on another node
    _, said = tula("tune", spec, "--time-limit=45", "--grace=2", "--launcher=slurm", "--", *hanging, fails=True)
    assert "still going after its time limit of 45 s" in said
    log = tula.logs()
    assert ["stack of rank 0" in log, "stack of rank 1" in log] == [True, True]
    assert log.count("in stuck_on_purpose") == 2
    wait_until(lambda: not processes_of(HANGS), within_s=30)


@pytest.mark.cluster("slurm")
def test_fewer_nodes_than_asked_for_is_one_sentence(
    server: Server, tmp_path: Path, slurm_environment: dict[str, str]
) -> None:
    tula = Tula(server, tmp_path, **slurm_environment)
    spec = tula.spec("too-many", nodes=64)
    _, said = tula("tune", spec, "--launcher=slurm", "--", SCRIPT, *BATCH, fails=True)
    assert "Unable to allocate resources" in said
