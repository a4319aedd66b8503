"""Probes the links between the namespaces of `benchmarks.support.cluster`, with one rank per node, and prints JSON."""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist

from benchmarks.support.gloo import fork_ranks
from tula_agent.measure.all_reduces import time_all_reduces

SECONDS = "TULA_BENCHMARK_PROBE_S"


def rank_main() -> None:
    """Probe the links as the only rank of a node.

    All namespaces share a host name, so GROUP_RANK states the node's number, as under torchrun.
    """
    os.environ["GROUP_RANK"] = os.environ["RANK"]
    dist.init_process_group("gloo")
    measured = time_all_reduces(torch.device("cpu"), float(os.environ[SECONDS]))
    if dist.get_rank() == 0:
        print(json.dumps(measured), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--namespaces", required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--interface", required=True)
    options = parser.parse_args()
    os.environ[SECONDS] = str(options.seconds)
    fork_ranks(
        rank_main,
        options.nodes,
        namespaces=options.namespaces,
        master=options.master,
        interface=options.interface,
    )
