"""Tests training runs that are not started by `tula` but registered by one line in the script or by TULA_JOB."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.forked import Server
from benchmarks.support.gloo import free_port
from tests.agent.joining_rank import JoiningRank
from tests.client.conftest import job_spec
from tests.e2e.slurm import slurm
from tests.support.forked_commands import launchers
from tula_agent.config import WantedJob, read_config
from tula_agent.run import Run
from tula_client import Client
from tula_wire import Configuration, JobSpec, TokenCreate
from tula_wire import Run as WireRun

UNEDITED = Path(__file__).parent / "scripts" / "unedited"
WITH_HOOK = Path(__file__).parents[1] / "agent" / "scripts" / "with_hook.py"
SHORT = ("--batch-size=8", "--epochs=4")
SCRIPT = """
import torch, torch.distributed as dist, tula_agent
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = tula_agent.init(job="one line", dataset_size=640, epochs=2)
run.watch(model, optimizer)
for batch in run.steps([torch.randn(8, 4) for _ in range(40)]):
    model(batch).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
KILLED = """
import os, time, torch, torch.distributed as dist, tula_agent, tula_client
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = tula_agent.init(dataset_size=640, epochs=2)
run.watch(model, optimizer)
client = tula_client.Client()
first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
dies = first_start and dist.get_rank() == int(os.environ["DIES"])

def running():
    jobs = client.jobs(search=os.environ["TULA_JOB"]).jobs
    return any(run.state == "running" for run in client.runs(jobs[0].id).runs) if jobs else False

for batch in run.steps([torch.randn(8, 4)] * (100_000 if first_start else 40)):
    try:
        model(batch).sum().backward()
    except RuntimeError:  # the other rank is gone: wait until torchrun stops this one, and report no end
        time.sleep(60)
    optimizer.step()
    time.sleep(0.004 if first_start else 0.0)
    if dies and run.position.step % 50 == 0 and running():
        os.kill(os.getpid(), 9)
dist.destroy_process_group()
"""
OTHER_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Uses a separate store for each start; from a shared one, a rank may read gloo's address of the start before."""


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as made:
        yield made


def runs_of(client: Client, job: str) -> list[WireRun]:
    return [run for run in client.handle(job).runs() if run.kind == "train"]


@pytest.fixture
def started_by_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make this process look as if torchrun had started it, with a log folder that remains across restarts."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))


def spec(name: str, **fields: Any) -> JobSpec:
    given = {"model": {"name": "m"}, "dataset": {"size": 100}, "epochs": 1, "cluster": {"max_nodes": 2}}
    return JobSpec.model_validate({"name": name, **given, **fields})


def train(url: str, tmp_path: Path, job: WantedJob, steps: int = 12, **environ: str) -> Run:
    """Train in this process until the end; return the run."""
    spool = {"TULA_URL": url, "TULA_SPOOL_DIR": str(tmp_path / "spool")}
    run = Run(read_config(spool | environ, job))
    for batch in run.steps([torch.randn(16, 2)] * steps):
        batch.sum()
    run.finish()
    return run


def torchrun(server: Server, *words: str, log: Path, **environ: str) -> None:
    """Run two ranks until they end, without the token and run id that `tula` would provide."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
    environment |= {"TULA_URL": server.url, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": str(launchers() / "python")}
    environment |= environ
    command = [str(launchers() / "torchrun"), "--standalone", "--nproc-per-node=2", *words]
    with log.open("w") as output:
        done = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=120, check=False)
    assert done.returncode == 0, log.read_text()


def test_two_ranks_register_the_job_and_join_one_run(client: Client, server: Server, tmp_path: Path) -> None:
    client.register(job_spec("imports SciPy"))  # a new service's first job takes longer than the script
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(SCRIPT)
    torchrun(server, str(script), log=log)
    (run,) = runs_of(client, "one line")
    assert (run.state, run.configuration) == (
        "succeeded",
        Configuration(num_nodes=1, local_batch_size=8, ranks_per_node=2),
    )
    assert run.num_samples >= 39
    assert run.configuration_mismatch is None
    assert {page.rank for page in client.samples(run.job_id, run_id=run.id).samples} == {0, 1}
    job = client.job(run.job_id)
    assert (job.spec.epochs, job.spec.dataset.size, job.spec.cluster[0].ranks_per_node) == (2, 640, 2)
    assert "no run" not in log.read_text()


def without_an_edit(server: Server, job: str, folder: Path, *command: str, **environ: str) -> None:
    """Run a command until it ends, with the name of its job in the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
    environment |= {"TULA_URL": server.url, "TULA_JOB": job, "OMP_NUM_THREADS": "1"} | environ
    subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=120, check=True)


def check_one_run(client: Client, job: str, ranks: int) -> None:
    (run,) = runs_of(client, job)
    assert (run.state, run.configuration.local_batch_size, run.configuration.world_size) == ("succeeded", 8, ranks)
    assert run.num_samples >= 8


def test_a_script_without_an_edit_joins_the_job_in_its_environment(
    client: Client, server: Server, tmp_path: Path
) -> None:
    """The run has one rank, since torchrun starts an interpreter for every rank; the next test has two ranks."""
    client.register(spec("no line", cluster={"max_nodes": 1, "ranks_per_node": 1}))
    command = [str(launchers() / "torchrun"), "--standalone", "--nproc-per-node=1", str(UNEDITED / "plain_ddp.py")]
    without_an_edit(server, "no line", tmp_path, *command, *SHORT)
    check_one_run(client, "no line", 1)


@pytest.mark.cluster("slurm")
def test_ranks_that_srun_starts_join_the_job_in_their_environment(
    client: Client, server: Server, tmp_path: Path
) -> None:
    """Forked ranks run the start-up hook through `with_hook.py`."""
    client.register(spec("no line under srun", cluster={"max_nodes": 1, "ranks_per_node": 2}))
    rank = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS"
    script = f"{rank} {launchers() / 'python'} {WITH_HOOK} {UNEDITED / 'plain_ddp.py'} {' '.join(SHORT)}"
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with slurm() as cluster:
        srun = ["srun", "--ntasks=2", "--overcommit", "bash", "-c", script]
        without_an_edit(server, "no line under srun", tmp_path, *srun, **place, **cluster)
    check_one_run(client, "no line under srun", 2)


def test_each_training_is_a_run_of_the_named_job(client: Client, server: Server, tmp_path: Path) -> None:
    registered = client.register(spec("known", cluster={"max_nodes": 2, "instance_type": "p3"})).job
    train(server.url, tmp_path, WantedJob(""), TULA_JOB="known")
    train(server.url, tmp_path, WantedJob(registered.id))
    both = runs_of(client, "known")
    assert [(run.state, run.num_samples) for run in both] == [("succeeded", 12)] * 2
    assert {run.configuration for run in both} == {Configuration(num_nodes=1, local_batch_size=16, instance_type="p3")}


def test_a_service_that_is_away_costs_one_warning_and_leaves_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(f"http://127.0.0.1:{free_port()}", tmp_path, WantedJob("away", 100))
    assert run.position.step == 12
    assert len(caplog.records) == 1, caplog.text
    assert not list((tmp_path / "spool").glob("*"))


def test_a_job_that_cannot_be_made_costs_one_warning(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(server.url, tmp_path, WantedJob("nameless"))
    assert run.position.step == 12
    assert [record.getMessage() for record in caplog.records] == [
        "tula: no run of job 'nameless' could be created (the job does not exist: to register it, pass dataset_size "
        "and epochs to tula_agent.init): nothing is measured, but training continues"
    ]
    assert not list((tmp_path / "spool").glob("*"))


def test_a_token_that_may_make_no_run_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Server(str(tmp_path / "tula.db")) as server, Client(server.url, token="") as client:
        client.register(spec("guarded"))
        secret = client.create_token(TokenCreate(name="reader", scope="read")).secret
        run = train(server.url, tmp_path, WantedJob("guarded", 100), TULA_TOKEN=secret)
    assert run.position.step == 12
    (record,) = caplog.records
    assert "no run of job 'guarded' could be created (403" in record.getMessage()


@pytest.mark.parametrize("dies", [0, 1])
def test_ranks_that_torchrun_starts_again_continue_their_run(
    client: Client, server: Server, tmp_path: Path, dies: int
) -> None:
    script, log, job = tmp_path / "train.py", tmp_path / "log", f"rank {dies} is killed"
    script.write_text(KILLED)
    torchrun(server, "--max-restarts=1", str(script), log=log, DIES=str(dies), TULA_JOB=job, **OTHER_STORES)
    now, before = runs_of(client, job)
    assert (before.state, before.end_cause, now.state) == ("failed", "superseded", "succeeded")
    assert now.configuration == before.configuration == Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=8)
    assert {page.rank for page in client.samples(now.job_id, run_id=now.id).samples} == {0, 1}


@pytest.mark.usefixtures("started_by_torchrun")
def test_a_run_of_another_job_is_not_continued(client: Client, server: Server) -> None:
    for job in ("first of two", "second of two"):
        rank = JoiningRank(dist.HashStore(), 0, server.url, job=job, world_size=1)
        assert rank.joining.ready(last=False)
    assert [run.state for job in ("first of two", "second of two") for run in runs_of(client, job)] == ["claimed"] * 2


@pytest.mark.usefixtures("started_by_torchrun")
def test_an_elastic_round_of_another_size_continues_the_run(client: Client, server: Server) -> None:
    """torchrun does not count a restart when ranks join or leave."""
    store = dist.HashStore()
    for world_size in (2, 1):
        first, *others = (
            JoiningRank(store, rank, server.url, job="resized", world_size=world_size) for rank in range(world_size)
        )
        for rank in others:
            assert not rank.joining.ready(last=False)
        assert first.joining.ready(last=False)
    now, before = runs_of(client, "resized")
    assert (now.configuration.world_size, before.configuration.world_size) == (1, 2)
    assert (before.state, before.end_cause) == ("failed", "superseded")


@pytest.mark.usefixtures("started_by_torchrun")
def test_a_restart_by_torchrun_continues_its_run(client: Client, server: Server) -> None:
    store = dist.HashStore()
    for start in range(2):
        first, other = (JoiningRank(store, rank, server.url, start=start) for rank in (0, 1))
        assert not first.joining.ready(last=False)  # the host of the other rank is unknown
        assert not other.joining.ready(last=False)
        assert first.joining.ready(last=False)
        assert other.joining.ready(last=False)
        assert other.joining.run_id == first.joining.run_id is not None
    now, before = runs_of(client, "elastic")
    wanted = Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=8, grad_accum_steps=2)
    assert now.configuration == before.configuration == wanted
    assert (before.state, before.end_cause) == ("failed", "superseded")


def test_a_restart_continues_the_run_before_on_whichever_machine_rank_0_is(
    client: Client, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is on machine `a`, then on `b`, then on `a` (whose own last run is older), and on `a` after a pause."""
    store = dist.HashStore()
    for start, machines in enumerate(("ab", "ba", "ab", "b", "a")):
        ranks = []
        for rank, machine in enumerate(machines):
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / machine / "attempt_0" / "0" / "error.json"))
            (tmp_path / machine).mkdir(exist_ok=True)
            size = len(machines)
            ranks.append(JoiningRank(store, rank, server.url, job="moving", start=start, world_size=size))
        first, *others = ranks
        for rank in others:
            assert not rank.joining.ready(last=False)
        assert first.joining.ready(last=False)
        for rank in others:
            assert rank.joining.ready(last=False)
    ends = [(run.state, run.end_cause) for run in reversed(runs_of(client, "moving"))]
    # The last start cannot know the fourth run; it must continue no run rather than the third one.
    assert ends == [*[("failed", "superseded")] * 3, *[("claimed", None)] * 2]
