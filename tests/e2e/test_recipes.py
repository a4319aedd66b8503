"""Tests `examples/launchers`: two torchruns that find each other, a SLURM batch job, and manifests for Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.support.cluster import Cluster
from benchmarks.support.forked import Server
from benchmarks.support.server import make_token
from tests.e2e.command import BATCH, SCRIPT, Tula, wait_until
from tests.e2e.machines import names
from tests.e2e.slurm import slurm
from tests.e2e.ssh import ssh
from tests.support.forked_commands import launchers
from tula_client.launch.template import Template
from tula_wire import Configuration, JobSpec

RECIPES = Path(__file__).parents[2] / "examples" / "launchers"
SSH = ["--", "bash", str(RECIPES / "ssh.sh"), "{num_nodes}", "{ranks_per_node}"]
KUBECTL = """#!{python}
import json, sys
from pathlib import Path
folder = Path({folder!r})
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "apply":
    (folder / "applied.json").write_text(sys.stdin.read())
elif sys.argv[1] == "get":
    print(json.dumps({{"status": {{"conditions": [{{"type": {ends!r}, "status": "True"}}]}}}}))
"""
SKY = """#!{python}
import json, os, sys
path = sys.argv[sys.argv.index("--env-file") + 1]
print(json.dumps({{"words": sys.argv[1:], "mode": oct(os.stat(path).st_mode & 0o777), "file": open(path).read()}}))
"""
JOB = {
    "name": "j",
    "model": {"name": "m"},
    "dataset": {"size": 1000},
    "cluster": {"min_nodes": 1, "max_nodes": 4, "ranks_per_node": 8},
}
"""A job with several numbers of nodes and batches, for which a recipe's command needs placeholders."""


def header(recipe: Path) -> tuple[Template, Template | None]:
    """Return the command in the header of a recipe, and the stop command if there is one."""
    lines = [line.removeprefix("#").strip() for line in recipe.read_text(encoding="utf-8").splitlines()]
    first = next(number for number, line in enumerate(lines) if "tula tune job.toml" in line)
    text = "\n".join(lines[first : lines.index("", first)])
    options, _, command = text.partition(" -- ")
    stop = re.search(r"--stop-command '([^']+)'", options)
    words = shlex.split(command.removeprefix("\\\n"))
    return Template(tuple(words)), Template(tuple(shlex.split(stop[1]))) if stop else None


@pytest.mark.parametrize("recipe", sorted(RECIPES.iterdir()), ids=lambda path: path.name)
def test_the_command_at_the_head_of_each_recipe_is_accepted(recipe: Path) -> None:
    command, _ = header(recipe)
    command.check(JobSpec.model_validate(JOB))
    assert recipe.name in " ".join(command.words)


def train_job(manifest: dict[str, Any]) -> dict[str, Any]:
    """Validate a manifest against Kubeflow's published model of a TrainJob; return the result. Raises if invalid."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    return dict(TrainerV1alpha1TrainJob.from_dict(manifest).to_dict())


def pytorch_job(manifest: dict[str, Any]) -> dict[str, Any]:
    """Validate a PyTorchJob against the names of its fields, and its pods against Kubernetes' published model."""
    from kubeflow_trainer_api.models import IoK8sApiCoreV1PodTemplateSpec as PodTemplate

    assert manifest["spec"].keys() == {"nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() <= {"Master", "Worker"}
    kept = {
        name: one | {"template": PodTemplate.from_dict(one["template"]).to_dict()} for name, one in replicas.items()
    }
    assert all(one.keys() == {"replicas", "restartPolicy", "template"} for one in kept.values())
    return manifest | {"spec": manifest["spec"] | {"pytorchReplicaSpecs": kept}}


PUBLISHED = {"TrainJob": train_job, "PyTorchJob": pytorch_job}


def program(folder: Path, name: str, text: str) -> str:
    """Write the script `text` as the program `name`; return a PATH on which this program is found first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))


@pytest.fixture(scope="module")
def two_machines(
    sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Server, dict[str, str]]]:
    """Start two machines and, on their host, a service that requires a token; yield them and variables for `tula`."""
    database = str(tmp_path_factory.mktemp("service") / "tula.db")
    shutil.copy(sqlite_template, database)
    make_token(database, "admin")
    with Cluster(2, 1000) as cluster, Server(database, host=cluster.host) as server:
        yield cluster, server, {"TULA_TOKEN": make_token(database)}


@pytest.fixture
def over_ssh(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, two_machines: tuple[Cluster, Server, dict[str, str]]
) -> Iterator[Tula]:
    """Return the command with an `ssh` on its PATH that can log in to the two machines."""
    cluster, service, environment = two_machines
    with ssh(cluster, tmp_path_factory.mktemp("ssh")) as path:
        where = os.pathsep.join((str(launchers()), path))
        yield Tula(service, tmp_path, forked=True, **environment, PATH=where, HOSTS=" ".join(names(cluster)))


@pytest.mark.cluster("ssh")
def test_two_machines_over_ssh_are_one_job_and_keep_no_process_of_it(over_ssh: Tula) -> None:
    tula = over_ssh
    spec = tula.spec("by-ssh", nodes=2, least_nodes=2)
    tula("tune", spec, *SSH, SCRIPT, *BATCH)
    (run,) = tula.runs("by-ssh")
    assert (run.state, run.configuration.world_size) == ("succeeded", 2)
    assert run.num_samples >= 8
    assert not tula.processes(SCRIPT)
    command = tula.start("run", "by-ssh", *SSH, SCRIPT, *BATCH, "--steps=100000")
    wait_until(lambda: tula.logs().count("starts at step") == 2)  # once in the profiling run, and once in this run
    # A forked process ends with the program that represents it on its machine, which is listed.
    assert len(tula.processes(SCRIPT)) >= 4  # on each machine, a torchrun and a rank
    command.kill()
    wait_until(lambda: not tula.processes(SCRIPT))


def test_too_few_hosts_are_named() -> None:
    asked = ["bash", str(RECIPES / "ssh.sh"), "3", "1", "train.py"]
    done = subprocess.run(asked, env=os.environ | {"HOSTS": "a b"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "HOSTS names 2 hosts, but this run needs 3: add hosts" in done.stderr


@pytest.mark.cluster("slurm-nodes")
def test_a_batch_job_of_slurm_on_two_machines_is_measured(
    tmp_path: Path, two_machines: tuple[Cluster, Server, dict[str, str]]
) -> None:
    cluster, service, environment = two_machines
    with slurm(cluster) as where:
        tula = Tula(service, tmp_path, forked=True, **environment, **where)
        spec = tula.spec("by-sbatch", nodes=2, least_nodes=2)
        recipe = ["bash", str(RECIPES / "sbatch.sh"), "{num_nodes}", "{ranks_per_node}", "{launch_id}", SCRIPT, *BATCH]
        tula("tune", spec, "--stop-command", "scancel --name=tula-{launch_id}", "--", *recipe)
        tula("run", "by-sbatch", "--launcher=slurm", "--", SCRIPT, *BATCH)
    measured, trained = tula.runs("by-sbatch")
    assert (measured.state, measured.configuration.world_size) == ("succeeded", 2)
    assert (trained.state, trained.configuration_mismatch) == ("succeeded", None)
    assert not list(
        tmp_path.glob(f"tula-{trained.id}*.out")
    )  # printed and removed; the output of a stopped command is kept


@pytest.mark.parametrize(
    ("more", "kind", "ends"), [((), "TrainJob", "Complete"), (("--pytorchjob",), "PyTorchJob", "Failed")]
)
def test_manifests_for_kubernetes_have_the_published_fields(
    tmp_path: Path, more: tuple[str, ...], kind: str, ends: str
) -> None:
    path = program(tmp_path, "kubectl", KUBECTL.format(python=sys.executable, folder=str(tmp_path), ends=ends))
    run = {"TULA_URL": "http://tula", "TULA_RUN_ID": "run-1", "TULA_TOKEN": "secret-1", "TULA_SPOOL_DIR": "/here"}
    asked = [
        sys.executable,
        str(RECIPES / "kubernetes_job.py"),
        "--image=train:1",
        *more,
        "4",
        "8",
        "run-1-ab",
        "train.py",
        "--b=8",
    ]
    done = subprocess.run(asked, env={"PATH": path, **run}, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0 if ends == "Complete" else 1, "")

    secret, job = json.loads((tmp_path / "applied.json").read_text())["items"]
    assert PUBLISHED[kind](job) == job
    assert (job["kind"], job["metadata"]) == (kind, {"name": "tula-run-1-ab"})
    assert secret["stringData"] == {name: value for name, value in run.items() if name != "TULA_SPOOL_DIR"}
    text = json.dumps(job)
    assert "secret-1" not in text, "the token is in the secret alone"
    assert '["torchrun", "train.py", "--b=8"]' in text
    assert (tmp_path / "calls").read_text().splitlines()[-1].startswith(f"delete {kind.lower()},secret tula-run-1-ab")


def test_the_skypilot_task_gets_the_batch_and_a_private_file_of_variables(tmp_path: Path) -> None:
    path = program(tmp_path / "bin", "sky", SKY.format(python=sys.executable))
    command, stop = header(RECIPES / "skypilot.yaml")
    configuration = Configuration(num_nodes=2, ranks_per_node=8, local_batch_size=32)
    words = command.fill(configuration, run_id="run-1", launch_id="run-1-ab", env_file=str(tmp_path / "a b.json"))
    variables = {"TULA_TOKEN": "secret-1", "TULA_RANKS_PER_NODE": "8", "TULA_SPOOL_DIR": "/here"}
    done = subprocess.run(words, env={"PATH": path, **variables}, capture_output=True, text=True, check=True)
    asked = json.loads(done.stdout)
    assert asked["mode"] == "0o600"
    assert sorted(asked["file"].split()) == ["TULA_RANKS_PER_NODE=8", "TULA_TOKEN=secret-1"]
    for expected in ("--cluster tula-run-1-ab", "--num-nodes 2", "--env BATCH=32"):
        assert expected in " ".join(asked["words"])
    assert stop is not None
    assert stop.fill(configuration, launch_id="run-1-ab") == ["sky", "down", "--yes", "tula-run-1-ab"]

    task = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    assert task.keys() == {"resources", "workdir", "setup", "run"}
    for variable in ("TULA_RANKS_PER_NODE", "BATCH", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"):
        assert f"${variable}" in task["run"]
