"""A SLURM cluster of one node on the loopback, with separate keys, ports and files; needs root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["slurm", "why_not"]

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun")

CONFIGURATION = """
ClusterName=tula
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=2
EnforcePartLimits=ALL
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES OverSubscribe=FORCE:8 MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no SLURM can be started here, in one sentence; None when one can."""
    missing = [name for name in PROGRAMS if _find(name) is None]
    if missing:
        return f"SLURM is not installed ({', '.join(missing)} missing): run tests/system-packages.sh"
    return None if os.geteuid() == 0 else "a SLURM of our own needs root"


@contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """Start it; yields the environment variables with which `srun` finds it. Raises RuntimeError with the reason."""
    if (reason := why_not()) is not None:
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory(prefix="tula-slurm-") as name, ExitStack() as stack:
        folder, host = Path(name), socket.gethostname().split(".")[0]
        for sub in ("state", "spool"):
            (folder / sub).mkdir()
        configuration = folder / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(host=host, folder=folder, controller=_port(), daemon=_port(), cpus=os.cpu_count() or 1)
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        environment = {"SLURM_CONF": str(configuration)}
        subprocess.run([str(_find("mungekey")), "--create", f"--keyfile={folder}/key"], check=True)
        munged = [
            f"--key-file={folder}/key", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed", "--foreground", "--force",
        ]  # fmt: skip
        for command in (["munged", *munged], ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", host]):
            stack.enter_context(_running(command, folder, environment))
        _wait_until_idle(folder, environment)
        yield environment


@contextmanager
def _running(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    with (folder / f"{command[0]}.out").open("w") as log:
        process = subprocess.Popen(
            [str(_find(command[0])), *command[1:]], env={**os.environ, **environment}, stdout=log, stderr=log
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


def _wait_until_idle(folder: Path, environment: dict[str, str]) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        state = subprocess.run(
            ["sinfo", "--noheader", "--format=%t"], env={**os.environ, **environment}, capture_output=True, text=True
        )
        if state.stdout.strip() == "idle":
            return
        time.sleep(0.1)
    logs = "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in folder.glob("*.out"))
    raise RuntimeError(f"SLURM did not start ({state.stdout.strip()} {state.stderr.strip()}): {logs}")


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
