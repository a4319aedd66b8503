"""Creates a TrainJob (Kubeflow Trainer v2) or a PyTorchJob (Training Operator v1) for a run, and waits until it ends.

    tula tune job.toml --stop-command 'kubectl delete trainjob,secret tula-{launch_id}' -- \
        python kubernetes_job.py --image registry.example/train:1 {num_nodes} {ranks_per_node} {launch_id} \
        train.py --batch-size={local_batch_size}

The `TULA_*` variables are stored in a Secret, from which the pods read them, so you need not enter them by hand. For a
PyTorchJob, add `--pytorchjob`, and replace `trainjob` with `pytorchjob` in the stop command. The script needs kubectl
and uses its current context and namespace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

LOCAL = ("TULA_SPOOL_DIR", "TULA_CHECKPOINT_DIR")  # folders on this machine; the pods need a volume for checkpoints
DONE = {"Complete": 0, "Succeeded": 0, "Failed": 1}


def kubectl(*words: str, stdin: str | None = None) -> str:
    """Return the output of kubectl; if kubectl fails, end this script with its error message."""
    done = subprocess.run(["kubectl", *words], input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"kubectl {words[0]} failed: {done.stderr.strip()}")
    return done.stdout


def secret(name: str, variables: dict[str, str]) -> dict[str, Any]:
    """Return a Secret that contains the variables of the run."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": variables}


def environment(name: str, variables: dict[str, str]) -> list[dict[str, Any]]:
    """Return the environment of a pod, which takes each variable from the Secret."""
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": variable}}}
        for variable in sorted(variables)
    ]


def train_job(name: str, options: argparse.Namespace, env: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a TrainJob; its runtime `torch-distributed` configures torchrun's nodes, processes and rendezvous."""
    trainer: dict[str, Any] = {
        "image": options.image,
        "command": ["torchrun", *options.script],
        "env": env,
        "numNodes": options.nodes,
        "numProcPerNode": options.ranks,
        "resourcesPerNode": {"limits": {options.device: str(options.ranks)}},
    }
    spec = {"runtimeRef": {"name": options.runtime}, "trainer": trainer}
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}, "spec": spec}


def pytorch_job(name: str, options: argparse.Namespace, env: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a PyTorchJob; the Training Operator sets torchrun's PET_* variables in every replica."""
    container = {
        "name": "pytorch",
        "image": options.image,
        "command": ["torchrun", *options.script],
        "env": env,
        "resources": {"limits": {options.device: str(options.ranks)}},
    }
    template = {"spec": {"containers": [container]}}
    replicas = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": template}}
    if options.nodes > 1:
        replicas["Worker"] = {"replicas": options.nodes - 1, "restartPolicy": "Never", "template": template}
    policy = {"cleanPodPolicy": "None"}  # pods must exist until their logs are printed; the API requires a policy
    spec = {"nprocPerNode": str(options.ranks), "pytorchReplicaSpecs": replicas, "runPolicy": policy}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name}, "spec": spec}


def wait(kind: str, name: str) -> int:
    """Wait until the job ends; return 0 if it has completed, or 1 if it has failed."""
    while True:
        conditions = json.loads(kubectl("get", kind, name, "--output=json")).get("status", {}).get("conditions", [])
        for condition in conditions:
            if condition["type"] in DONE and condition["status"] == "True":
                return DONE[condition["type"]]
        time.sleep(2)


def main() -> int:
    """Apply the manifests, wait until the job ends, print its logs, and delete the objects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", required=True, help="image that contains the script and its packages")
    parser.add_argument("--pytorchjob", action="store_true", help="create a PyTorchJob instead of a TrainJob")
    parser.add_argument("--runtime", default="torch-distributed", help="ClusterTrainingRuntime of the TrainJob")
    parser.add_argument("--device", default="nvidia.com/gpu", help="resource of which each rank needs one unit")
    parser.add_argument("nodes", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("id")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    name = f"tula-{options.id}"
    variables = {k: v for k, v in os.environ.items() if k.startswith("TULA_") and k not in LOCAL}
    make, kind = (pytorch_job, "pytorchjob") if options.pytorchjob else (train_job, "trainjob")
    manifests = [secret(name, variables), make(name, options, environment(name, variables))]
    kubectl("apply", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))
    try:
        status = wait(kind, name)
        label = "training.kubeflow.org/job-name" if options.pytorchjob else "jobset.sigs.k8s.io/jobset-name"
        print(kubectl("logs", f"--selector={label}={name}", "--tail=-1", "--prefix"))
    finally:
        kubectl("delete", f"{kind},secret", name, "--wait=false")
    return status


if __name__ == "__main__":
    sys.exit(main())
