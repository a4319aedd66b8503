"""The cluster of namespaces is one: links hold their rate, ranks train across them, and nothing stays behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
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
    """What a transfer from node 0 to node 1 really reaches."""
    receive = cluster.command(1, [sys.executable, "-c", RECEIVE, cluster.address(1)])
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "up\n"
        subprocess.run(cluster.command(0, [sys.executable, "-c", SEND, cluster.address(1), str(size)]), check=True)
        return float(receiver.stdout.readline())


def best_rate_mbit(cluster: Cluster, size: int, *, enough: float) -> float:
    """The best of at most ten transfers, since a busy machine only lowers it; ends at the first above `enough`."""
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
    """The time of a TCP handshake from node 0 to node 1."""
    receive = cluster.command(1, [sys.executable, "-c", RECEIVE, cluster.address(1)])
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "up\n"
        connect = cluster.command(0, [sys.executable, "-c", CONNECT, cluster.address(1)])
        return float(subprocess.run(connect, capture_output=True, text=True, check=True).stdout)


def step_time_s(cluster: Cluster) -> float:
    """The fastest step of a real DDP job over two nodes: a busy machine only makes steps longer."""
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
    # 1 MiB of gradients: 84 ms at 100 Mbit/s, 336 ms at a quarter, beside 15 ms of device time.
    assert 0.08 < fast < slow / 1.8
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in names)


@pytest.mark.cluster("delay")
def test_links_delay_what_they_carry_where_the_kernel_can() -> None:
    with Cluster(2, 100, delay_ms=20) as cluster:
        assert round_trip_s(cluster) >= 0.08  # over two links, there and back


TRAIN = """
import hashlib, time
import torch
import torch.distributed as dist
from torch import nn

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("rank", dist.get_rank(), "of", dist.get_world_size(), hashlib.sha256(weights).hexdigest(), flush=True)
    time.sleep(0.05)
    dist.destroy_process_group()

main()
"""


def test_a_torchrun_on_each_node_finds_the_other_over_the_links(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Cluster(2, 1000) as cluster, ExitStack() as running:
        meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={cluster.address(0)}:29500", "--rdzv-id=two"]
        hosts = ["--rdzv-conf=is_host=1", "--rdzv-conf=is_host=0"]  # all nodes have this machine's name
        nodes = []
        for node in range(2):
            options = [hosts[node], f"--local-addr={cluster.address(node)}", "--nproc-per-node=1", str(script)]
            process = subprocess.Popen(
                cluster.command(node, [sys.executable, "-m", "torch.distributed.run", *meeting, *options]),
                env={**environment, "GLOO_SOCKET_IFNAME": cluster.interface}, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            running.callback(process.kill)
            nodes.append(process)
        said = [process.communicate(timeout=120)[0] for process in nodes]
        assert [process.returncode for process in nodes] == [0, 0]
        crossed = cluster.sent_bytes(1)
    ranks = sorted(line.split() for out in said for line in out.splitlines() if line.startswith("rank "))
    assert [words[1:4] for words in ranks] == [["0", "of", "2"], ["1", "of", "2"]]
    assert ranks[0][4] == ranks[1][4]
    assert crossed > 5 * 512 * 512 * 4  # a gradient a step, at least
