"""Starts SLURM with one node on loopback, or with a cluster's machines, with separate keys, ports and files."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.support import cluster
from benchmarks.support.cluster import Cluster
from tests.e2e.machines import find, machines, names

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun")

CONFIGURATION = """
ClusterName=tula
SlurmctldHost={host}({address})
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=2
EnforcePartLimits=ALL
MpiDefault=none
{nodes}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8 MaxTime=INFINITE State=UP
"""


NODE = f"NodeName={{name}} NodeAddr={{address}} CPUs={os.cpu_count() or 1} State=UNKNOWN"


def why_not() -> str | None:
    """Return in one sentence why SLURM cannot be started on this machine, or None if it can."""
    missing = [name for name in PROGRAMS if find(name) is None]
    if missing:
        return f"SLURM is not installed ({', '.join(missing)} missing): run tests/system-packages.sh"
    return None if os.geteuid() == 0 else "a SLURM of our own needs root"


def why_not_several() -> str | None:
    """Return in one sentence why SLURM cannot be started on several machines, or None if it can."""
    return why_not() or cluster.why_not()


@contextmanager
def slurm(nodes: Cluster | None = None) -> Iterator[dict[str, str]]:
    """Start SLURM on the machines of `nodes` or on this machine; yield the environment variables that `srun` needs.

    Raises RuntimeError with the reason if SLURM does not start.
    """
    if (reason := why_not()) is not None:
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory(prefix="tula-slurm-") as name, ExitStack() as stack:
        folder, host = Path(name), socket.gethostname().split(".")[0]
        (folder / "state").mkdir()
        addresses = {host: "127.0.0.1"} if nodes is None else dict(zip(names(nodes), _addresses(nodes), strict=True))
        configuration = folder / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(
                host=host,
                address="127.0.0.1" if nodes is None else nodes.host,
                folder=folder,
                controller=_port(),
                daemon=_port(),
                nodes="\n".join(NODE.format(name=name, address=addresses[name]) for name in addresses),
            )
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        environment = {"SLURM_CONF": str(configuration)}
        subprocess.run([str(find("mungekey")), "--create", f"--keyfile={folder}/key"], check=True)
        munged = [
            f"--key-file={folder}/key", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed", "--foreground", "--force",
        ]  # fmt: skip
        for command in (["munged", *munged], ["slurmctld", "-D", "-i"]):
            stack.enter_context(_running(command, folder, environment))
        if nodes is None:
            stack.enter_context(_running(["slurmd", "-D", "-N", host], folder, environment))
        else:
            daemon = f"{shlex.quote(str(find('slurmd')))} -D -N {{name}}"
            stack.enter_context(machines(nodes, folder, daemon, **environment))
        _wait_until_idle(folder, environment, len(addresses))
        yield environment


@contextmanager
def _running(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    with (folder / f"{command[0]}.out").open("w") as log:
        process = subprocess.Popen(
            [str(find(command[0])), *command[1:]], env={**os.environ, **environment}, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _addresses(nodes: Cluster) -> list[str]:
    return [nodes.address(number) for number in range(nodes.num_nodes)]


def _wait_until_idle(folder: Path, environment: dict[str, str], num_nodes: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        state = subprocess.run(
            ["sinfo", "--noheader", "--format=%t %D"], env={**os.environ, **environment}, capture_output=True, text=True
        )
        if state.stdout.strip() == f"idle {num_nodes}":
            return
        time.sleep(0.1)
    logs = "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in [*folder.glob("*.out"), *folder.glob("*.log")])
    raise RuntimeError(f"SLURM did not start ({state.stdout.strip()} {state.stderr.strip()}): {logs}")


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
