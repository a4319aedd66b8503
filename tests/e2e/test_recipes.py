"""The launchers of `examples/launchers`: two torchruns that meet, a batch job of SLURM, and Kubernetes' manifests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from benchmarks.support.forked import Server
from tests.e2e.command import BATCH, SCRIPT, Tula
from tests.e2e.slurm import slurm

RECIPES = Path(__file__).parents[2] / "examples" / "launchers"
SSH = """#!/bin/sh
# Stands in for a connection to another machine: the program that runs there gets the same input, and nothing else.
shift 3
exec env -i HOME="$HOME" "$@"
"""
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
ENV = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "value": {"type": "string"}, "valueFrom": {"type": "object"}},
    },
}
LIMITS = {"type": "object", "properties": {"limits": {"additionalProperties": {"type": "string"}}}}
WORDS = {"type": "array", "items": {"type": "string"}}


def strict(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """A schema of an object that allows these properties only."""
    return {"type": "object", "properties": properties, "additionalProperties": False, "required": required or []}


TRAINER = strict(
    image={"type": "string", "maxLength": 500},
    command=WORDS,
    args=WORDS,
    env=ENV,
    numNodes={"type": "integer"},
    numProcPerNode={"type": "integer"},
    resourcesPerNode=LIMITS,
)
TRAIN_JOB = strict(
    ["runtimeRef"],
    trainer=TRAINER,
    runtimeRef=strict(["name"], name={"type": "string"}, kind={"type": "string"}, apiGroup={"type": "string"}),
)
CONTAINER = strict(["name"], name={}, image={"type": "string"}, command=WORDS, env=ENV, resources=LIMITS)
REPLICA = strict(
    replicas={"type": "integer"},
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=strict(spec=strict(["containers"], containers={"type": "array", "items": CONTAINER})),
)
PYTORCH_JOB = strict(
    ["pytorchReplicaSpecs"],
    nprocPerNode={"type": "string"},
    pytorchReplicaSpecs=strict(Master=REPLICA, Worker=REPLICA),
)
"""What the manifests use of the published definitions: trainjobs of trainer.kubeflow.org/v1alpha1, pytorchjobs of
kubeflow.org/v1."""


def program(folder: Path, name: str, text: str) -> str:
    """A PATH on which `name` is this script."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))


def test_two_nodes_over_ssh_are_one_job(server: Server, tmp_path: Path) -> None:
    path = program(tmp_path / "bin", "ssh", SSH)
    tula = Tula(server, tmp_path, PATH=path, HOSTS="127.0.0.1 localhost")
    spec = tula.spec("by-ssh", nodes=2, least_nodes=2)
    tula("tune", spec, "--", "bash", str(RECIPES / "ssh.sh"), "{num_nodes}", "{ranks_per_node}", SCRIPT, *BATCH)
    (run,) = tula.runs("by-ssh")
    assert (run.state, run.configuration.world_size) == ("succeeded", 2)
    assert run.num_samples >= 8
    assert not tula.processes(SCRIPT)


def test_too_few_hosts_are_named() -> None:
    asked = ["bash", str(RECIPES / "ssh.sh"), "3", "1", "train.py"]
    done = subprocess.run(asked, env=os.environ | {"HOSTS": "a b"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "HOSTS names 2 hosts, and this run needs 3: name more" in done.stderr


@pytest.fixture(scope="module")
def slurm_environment() -> Iterator[dict[str, str]]:
    """A real SLURM of one node."""
    with slurm() as environment:
        yield environment


@pytest.mark.cluster("slurm")
def test_a_batch_job_of_slurm_is_measured(server: Server, tmp_path: Path, slurm_environment: dict[str, str]) -> None:
    tula = Tula(server, tmp_path, forked=True, **slurm_environment)
    spec = tula.spec("by-sbatch", nodes=1, ranks=2)
    recipe = ["bash", str(RECIPES / "sbatch.sh"), "{num_nodes}", "{ranks_per_node}", "{launch_id}", SCRIPT, *BATCH]
    tula("tune", spec, "--stop-command", "scancel --name=tula-{launch_id}", "--", *recipe)
    (run,) = tula.runs("by-sbatch")
    assert (run.state, run.configuration.world_size) == ("succeeded", 2)
    assert not list(tmp_path.glob("*.out"))  # printed, and removed


@pytest.mark.parametrize(
    ("more", "kind", "schema", "ends"),
    [((), "TrainJob", TRAIN_JOB, "Complete"), (("--pytorchjob",), "PyTorchJob", PYTORCH_JOB, "Failed")],
)
def test_manifests_for_kubernetes_have_the_published_fields(
    tmp_path: Path, more: tuple[str, ...], kind: str, schema: dict[str, Any], ends: str
) -> None:
    path = program(tmp_path, "kubectl", KUBECTL.format(python=sys.executable, folder=str(tmp_path), ends=ends))
    run = {"TULA_URL": "http://tula", "TULA_RUN_ID": "run-1", "TULA_TOKEN": "secret-1", "TULA_SPOOL_DIR": "/here"}
    asked = [
        sys.executable,
        str(RECIPES / "kubernetes.py"),
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
    jsonschema.validate(job["spec"], schema)
    assert (job["kind"], job["metadata"]) == (kind, {"name": "tula-run-1-ab"})
    assert secret["stringData"] == {name: value for name, value in run.items() if name != "TULA_SPOOL_DIR"}
    text = json.dumps(job)
    assert "secret-1" not in text, "the token is in the secret alone"
    assert '["torchrun", "train.py", "--b=8"]' in text
    assert (tmp_path / "calls").read_text().splitlines()[-1].startswith(f"delete {kind.lower()},secret tula-run-1-ab")


def test_the_skypilot_task_is_yaml_and_uses_what_the_launcher_sets() -> None:
    task = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    assert {"resources", "workdir", "setup", "run"} == task.keys()
    for variable in ("TULA_RANKS_PER_NODE", "TULA_LOCAL_BATCH_SIZE", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"):
        assert f"${variable}" in task["run"]
