"""Machines to log in to: each node of a cluster of namespaces has a hostname, /etc/hosts, processes and a real sshd."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.support import cluster
from benchmarks.support.cluster import Cluster

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
    User root
"""
EVERY_HOST = """
Host *
    IdentityFile {folder}/key
    UserKnownHostsFile {folder}/known_hosts
"""
START = "mount --bind {folder}/hosts /etc/hosts && hostname {name} && exec {sshd} -D -e -f {folder}/sshd_config"


def why_not() -> str | None:
    """Why no such machines can be had here, in one sentence; None when they can."""
    missing = [name for name in PROGRAMS if _find(name) is None]
    if missing:
        return f"OpenSSH is not installed ({', '.join(missing)} missing): run tests/system-packages.sh"
    return cluster.why_not()


@contextmanager
def ssh_nodes(nodes: Cluster, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A PATH on which `ssh` knows the nodes of this cluster by name, and the names; their sshd end with the block."""
    names = [f"node{number}" for number in range(nodes.num_nodes)]
    addresses = [nodes.address(number) for number in range(nodes.num_nodes)]
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    public = (folder / "key.pub").read_text()
    known = "".join(f"{name} {public}" for name in names)
    hosts = "".join(f"{address} {name}\n" for name, address in zip(names, addresses, strict=True))
    config = "".join(CLIENT.format(name=name, address=address) for name, address in zip(names, addresses, strict=True))
    written = {
        "known_hosts": known,
        "hosts": f"127.0.0.1 localhost\n{hosts}",
        "sshd_config": SERVER.format(folder=folder),
        "ssh_config": config + EVERY_HOST.format(folder=folder),
        "ssh": f'#!/bin/sh\nexec {_find("ssh")} -F {shlex.quote(str(folder / "ssh_config"))} "$@"\n',
    }
    for name, text in written.items():
        (folder / name).write_text(text)
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd refuses to start without it
    path = os.pathsep.join((str(folder), os.environ["PATH"]))
    with ExitStack() as running:
        for number, name in enumerate(names):
            start = START.format(folder=shlex.quote(str(folder)), name=name, sshd=_find("sshd"))
            machine = [
                "unshare",
                "--mount",
                "--uts",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-c",
                start,
            ]
            with (folder / f"{name}.log").open("w") as log:
                daemon = subprocess.Popen(nodes.command(number, machine), stderr=log)
            running.callback(daemon.wait, 10)
            running.callback(daemon.kill)  # and with it everything that runs on this machine
        for name in names:
            _wait_until_reached(name, path, folder)
        yield path, names


def _wait_until_reached(name: str, path: str, folder: Path) -> None:
    until = time.monotonic() + 20
    asked = [str(folder / "ssh"), "-o", "BatchMode=yes", name, "hostname"]
    while True:
        done = subprocess.run(asked, capture_output=True, text=True, check=False, env={"PATH": path})
        if done.stdout.strip() == name:
            return
        if time.monotonic() > until:
            raise RuntimeError(f"{name} cannot be reached: {done.stderr} {(folder / f'{name}.log').read_text()}")
        time.sleep(0.1)


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
