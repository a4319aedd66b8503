"""Starts a real sshd on each machine of a cluster, and creates an `ssh` that can log in to every machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.support import cluster
from benchmarks.support.cluster import Cluster
from tests.e2e.machines import find, machines, names

PROGRAMS = ("sshd", "ssh", "ssh-keygen")

SERVER = """
Port 22
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PidFile none
"""
CLIENT = """
Host {name}
    HostName {address}
    HostKeyAlias {name}
"""
EVERY_HOST = """
Host *
    User root
    IdentityFile {folder}/key
    UserKnownHostsFile {folder}/known_hosts
"""


def why_not() -> str | None:
    """Return in one sentence why machines with sshd cannot be created here, or None if they can."""
    missing = [name for name in PROGRAMS if find(name) is None]
    if missing:
        return f"OpenSSH is not installed ({', '.join(missing)} missing): run tests/system-packages.sh"
    return cluster.why_not()


@contextmanager
def ssh(nodes: Cluster, folder: Path) -> Iterator[str]:
    """Start the daemons; yield a PATH whose `ssh` reaches the machines by name. Leaving the block ends the daemons."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    public = (folder / "key.pub").read_text()
    hosts = (CLIENT.format(name=name, address=nodes.address(number)) for number, name in enumerate(names(nodes)))
    written = {
        "known_hosts": "".join(f"{name} {public}" for name in names(nodes)),
        "sshd_config": SERVER.format(folder=folder),
        "ssh_config": "".join(hosts) + EVERY_HOST.format(folder=folder),
        "ssh": f'#!/bin/sh\nexec {find("ssh")} -F {shlex.quote(str(folder / "ssh_config"))} "$@"\n',
    }
    for name, text in written.items():
        (folder / name).write_text(text)
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd does not start without this folder
    path = os.pathsep.join((str(folder), os.environ["PATH"]))
    with machines(nodes, folder, f"{find('sshd')} -D -e -f {shlex.quote(str(folder / 'sshd_config'))}"):
        for name in names(nodes):
            _wait_until_reached(name, path, folder)
        yield path


def _wait_until_reached(name: str, path: str, folder: Path) -> None:
    until = time.monotonic() + 120
    asked = [str(folder / "ssh"), "-o", "BatchMode=yes", name, "hostname"]
    while True:
        done = subprocess.run(asked, capture_output=True, text=True, check=False, env={"PATH": path})
        if done.stdout.strip() == name:
            return
        if time.monotonic() > until:
            raise RuntimeError(f"{name} cannot be reached: {done.stderr} {(folder / f'{name}.log').read_text()}")
        time.sleep(0.1)
