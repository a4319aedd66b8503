"""Scaling settings of the service change the steps of two real ranks, and a harmful one is rolled back."""

from __future__ import annotations

import re
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


def train(server: Server, folder: Path, job_id: str, run_id: str, *arguments: str) -> list[str]:
    """Lines that the two ranks printed."""
    environment = clean_environment(
        TULA_URL=server.url,
        TULA_JOB_ID=job_id,
        TULA_RUN_ID=run_id,
        TULA_SPOOL_DIR=str(folder / "spool"),
        PYTHON_EXEC=str(launchers() / "python"),
    )
    command = [str(launchers() / "torchrun"), "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:] + server.log()[-3000:]
    return done.stdout.splitlines()


def by_rank(lines: list[str], word: str) -> list[list[str]]:
    """Of each rank, its lines that begin with `word`, without the rank."""
    found = [line.rpartition(" rank ") for line in lines if line.startswith(word)]
    return [[said for said, _, rank in found if rank == wanted] for wanted in ("0", "1")]


def test_a_policy_set_on_the_service_takes_effect_on_all_ranks_at_one_step(tmp_path: Path, sqlite_url: str) -> None:
    with Server(sqlite_url) as server, Client(server.url, token="") as client:
        job = client.register(SPEC).job
        client.patch_scaling(job.id, ScalingPatch(policy="static", static_scale=1.5, small_batch_size=8))
        run = client.create_run(job.id, RunCreate(kind="train", configuration=CONFIGURATION))
        lines = train(server, tmp_path, job.id, run.id, "open", "static")
        measured = client.scaling(job.id).thresholds
        advice = client.recommendation(job.id, objective="time_to_quality")
    first, second = by_rank(lines, "thresholds")
    assert first == second
    # Policy and static_scale are the service's; the script passed small_batch_size, so 4 stays; delta may be tuned.
    assert re.fullmatch(r"thresholds \d+ static \d\.\d+ 4 1\.5 at \d+", first[-1])
    # And the noise that the ranks measured before that has become what a batch is worth.
    assert measured is not None
    assert measured.gradient_noise_scale is not None
    assert measured.gradient_noise_scale > 0
    assert measured.gradient_noise_scale_error is not None
    assert measured.critical_batch_size == measured.gradient_noise_scale
    assert advice.max_sensible_batch_size is not None
    assert advice.max_sensible_batch_size > measured.gradient_noise_scale


def test_a_tuned_threshold_that_lowers_accuracy_is_rolled_back_on_all_ranks_at_one_step(
    tmp_path: Path, sqlite_url: str
) -> None:
    with Server(sqlite_url) as server, Client(server.url, token="") as client:
        job = client.register(SPEC).job
        run = client.create_run(job.id, RunCreate(kind="train", configuration=CONFIGURATION))
        lines = train(server, tmp_path, job.id, run.id, "ags", "roll-back")
        answered = client.scaling(job.id, policy="ags").thresholds
    assert answered is not None
    assert answered.reason.startswith("rolled back")
    assert answered.delta is None  # the script's value applies again
    first, second = by_rank(lines, "thresholds")
    assert first == second
    deltas = [float(line.split()[3]) for line in first]
    assert deltas[-1] == 0.5
    assert min(deltas) != max(deltas)
