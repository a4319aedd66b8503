"""`tula probe` between the namespaces of `benchmarks.support.cluster`: one rank on each of so many nodes."""

from __future__ import annotations

import argparse
import sys

from benchmarks.support.gloo import fork_ranks
from tula_agent.commands import probe

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--namespaces", required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--interface", required=True)
    options = parser.parse_args()
    sys.argv = [sys.argv[0], str(options.seconds)]
    fork_ranks(
        probe.main,
        options.nodes,
        namespaces=options.namespaces,
        master=options.master,
        interface=options.interface,
    )
