"""The nodes of a cluster of namespaces as machines: each has a hostname, /etc/hosts, processes and a daemon."""

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
    """The path of a program, also of one that only root has on its PATH."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def names(cluster: Cluster) -> list[str]:
    """The machines' hostnames."""
    return [f"node{number}" for number in range(cluster.num_nodes)]


@contextmanager
def machines(cluster: Cluster, folder: Path, daemon: str, **environment: str) -> Iterator[None]:
    """Run a shell command with `{name}` on each machine; its output is in NAME.log.

    At the end it is killed, and with it everything else that runs on its machine.
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
