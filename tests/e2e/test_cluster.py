"""Tests the cluster of namespaces: links keep their rate, ranks train across them, and nothing is left behind.

`test_recipes.py` tests that torchruns on two machines find each other.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.support.cluster import Cluster
from tests.support.forked_commands import launchers

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.cluster("namespaces")

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as link:
    link.sendall(b"x" * int(sys.argv[2]))
    link.shutdown(socket.SHUT_WR)
    link.recv(1)
"""
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 7000)) as server:
    print("up", flush=True)
    link, _ = server.accept()
    with link:
        began, got = time.monotonic(), 0
        while block := link.recv(65536):
            got += len(block)
        print(got * 8 / (time.monotonic() - began) / 1e6, flush=True)
"""


def rate_mbit(cluster: Cluster, size: int) -> float:
    """Return the measured rate of a transfer from node 0 to node 1 in Mbit/s."""
    receive = cluster.command(1, [sys.executable, "-c", RECEIVE, cluster.address(1)])
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "up\n"
        subprocess.run(cluster.command(0, [sys.executable, "-c", SEND, cluster.address(1), str(size)]), check=True)
        return float(receiver.stdout.readline())


def best_rate_mbit(cluster: Cluster, size: int, *, enough: float) -> float:
    """Return the highest rate of up to ten transfers, which a busy machine slows; stop once a rate exceeds `enough`."""
    best = 0.0
    for _ in range(10):
        best = max(best, rate_mbit(cluster, size))
        if best > enough:
            break
    return best


CONNECT = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 7000)):
    print(time.monotonic() - began)
"""


def round_trip_s(cluster: Cluster) -> float:
    """Return how many seconds a TCP handshake from node 0 to node 1 takes."""
    receive = cluster.command(1, [sys.executable, "-c", RECEIVE, cluster.address(1)])
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "up\n"
        connect = cluster.command(0, [sys.executable, "-c", CONNECT, cluster.address(1)])
        return float(subprocess.run(connect, capture_output=True, text=True, check=True).stdout)


def step_time_s(cluster: Cluster) -> float:
    """Return the shortest step time of a real DDP job on two nodes, since a busy machine only makes steps longer."""
    job = [launchers() / "python", "-m", "benchmarks._cluster_job"]
    job += ["--nodes=2", "--batch-size=8", "--steps=12", "--show-steps"]
    place = [f"--{name}={value}" for name, value in cluster.for_ranks.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*job, *place], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    times = [float(found) for found in re.findall(r"^step \d+ ([\d.]+)$", done.stdout, re.MULTILINE)]
    return min(after - before for before, after in pairwise(times))


def test_links_hold_their_rate_and_training_feels_it() -> None:
    with Cluster(2, 100) as cluster:
        names = [cluster.namespace(node) for node in range(2)]
        assert 80 < best_rate_mbit(cluster, 5_000_000, enough=80) < 105
        fast = step_time_s(cluster)
        cluster.set_rate(25)
        assert 18 < best_rate_mbit(cluster, 1_500_000, enough=18) < 28
        slow = step_time_s(cluster)
    # 1 MiB of gradients takes 84 ms at 100 Mbit/s and 336 ms at a quarter of it, in addition to 15 ms of device time.
    assert 0.08 < fast < slow / 1.8
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in names)


@pytest.mark.cluster("delay")
def test_links_delay_what_they_carry_where_the_kernel_can() -> None:
    with Cluster(2, 100, delay_ms=20) as cluster:
        assert round_trip_s(cluster) >= 0.08  # in both directions over two links
