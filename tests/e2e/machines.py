"""Turns nodes of a cluster of network namespaces into machines with hostnames, /etc/hosts, processes and daemons."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.support.cluster import Cluster

ISOLATED = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")


def find(program: str) -> str | None:
    """Return the path of a program, even if only root has its folder on the PATH."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def names(cluster: Cluster) -> list[str]:
    """Return the hostnames of the machines."""
    return [f"node{number}" for number in range(cluster.num_nodes)]


@contextmanager
def machines(cluster: Cluster, folder: Path, daemon: str, **environment: str) -> Iterator[None]:
    """Run a shell command, which may contain `{name}`, on each machine; its output is written to NAME.log.

    At the end, the command and all other processes on its machine are killed.
    """
    addresses = {"localhost": "127.0.0.1", socket.gethostname().split(".")[0]: cluster.host}
    addresses |= {name: cluster.address(number) for number, name in enumerate(names(cluster))}
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
    variables: Mapping[str, str] = {**os.environ, **environment}
    with ExitStack() as running:
        for number, name in enumerate(names(cluster)):
            mount = f"mount --bind {shlex.quote(str(folder / 'hosts'))} /etc/hosts && hostname {name}"
            command = cluster.command(number, [*ISOLATED, f"{mount} && exec {daemon.format(name=name)}"])
            with (folder / f"{name}.log").open("w") as log:
                process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
            running.callback(process.wait, 10)
            running.callback(process.kill)
        yield
