"""`tula probe` between the namespaces of `benchmarks.support.cluster`: one rank on each of so many nodes."""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.support.gloo import fork_ranks
from tula_agent.commands import probe


def rank_main() -> None:
    """A namespace has the name of its host: say that each rank is on a separate node, as torchrun does."""
    os.environ["GROUP_RANK"] = os.environ["RANK"]
    probe.main()


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
        rank_main,
        options.nodes,
        namespaces=options.namespaces,
        master=options.master,
        interface=options.interface,
    )
