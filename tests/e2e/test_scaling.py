"""Tests that a setting changed at the service changes the training steps of two real ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.support import clean_environment
from benchmarks.support.forked import Server
from tests.support.forked_commands import launchers
from tula_client import Client
from tula_wire import Configuration, JobSpec, RunCreate, ScalingPatch

SCRIPT = Path(__file__).parent / "scripts" / "steered.py"
SPEC = JobSpec.model_validate(
    {"name": "steered", "model": {"name": "net"}, "dataset": {"size": 16_000}, "cluster": {"max_nodes": 2}}
)
CONFIGURATION = Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=8)


def train(server: Server, folder: Path, job_id: str, run_id: str) -> list[str]:
    """Train with two ranks; return the lines that they printed."""
    environment = clean_environment(
        TULA_URL=server.url,
        TULA_JOB_ID=job_id,
        TULA_RUN_ID=run_id,
        TULA_SPOOL_DIR=str(folder / "spool"),
        PYTHON_EXEC=str(launchers() / "python"),
    )
    command = [str(launchers() / "torchrun"), "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + server.log()[-3000:]
    return done.stdout.splitlines()


def test_numbers_set_on_the_service_take_effect_on_all_ranks_at_one_step(tmp_path: Path, sqlite_url: str) -> None:
    with Server(sqlite_url) as server, Client(server.url, token="") as client:
        job = client.register(SPEC).job
        client.patch_scaling(job.id, ScalingPatch(static_scale=1.5, small_batch_size=8), policy="static")
        run = client.create_run(job.id, RunCreate(kind="train", configuration=CONFIGURATION))
        lines = [line for line in train(server, tmp_path, job.id, run.id) if line.startswith("served")]
    assert len(lines) == 2
    assert len({line.rpartition(" rank ")[0] for line in lines}) == 1
    # The factor comes from the service; the script has passed small_batch_size, so this stays 4.
    assert lines[0].startswith("served 1.5 4 at ")
