"""What the service answers for the paper's four networks before any run, beside what the paper reports of them.

    python -m benchmarks.paper_answers [--json OUT] [--smoke]

The jobs are those of `examples/paper`, on 16 nodes: the knee; the batch of least cost where a gigabyte of accelerator
memory costs $0.15 an hour and a node nothing; how much faster the knee is than the smallest batch; and the largest
batch that fits into memory and the data set. No service and no run: the first guess from data sheets and the network's
facts, which a run replaces. `python docs/hooks.py` writes the table into `docs/paper.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tula_wire as wire
from benchmarks.support.report import parser_of, print_table, write_json
from tula_client.launch.spec import load_spec
from tula_service.analysis.answer import Answer, analyse
from tula_service.analysis.job_data import JobData

JOBS = Path(__file__).parents[1] / "examples" / "paper"
NODES = 16
USD_PER_GB_HOUR = 0.15
HEADER = ("network", "knee: paper", "ours", "least cost: paper", "ours", "times faster: paper", "ours", "largest batch")


@dataclass(frozen=True)
class Row:
    """Global batches on 16 nodes, and how many times faster the knee's epoch is than that of the smallest batch."""

    knee: int
    least_cost: int
    speed_up: float
    largest: int | None = None


PAPER = {
    "resnet50": Row(8192, 16384, 16.0),
    "vgg11": Row(8192, 16384, 20.0),
    "alexnet": Row(1024, 2048, 8.0),
    "mobilenet_v3_large": Row(2048, 1024, 7.7),
}
"""Section IV-C for the batches, VII for the speed-ups, which the paper states as "up to"."""


def answer(name: str) -> Row:
    """The service's first answers for one network."""
    spec = load_spec(JOBS / f"{name}.toml")
    knee = _analysed(spec, spec.cluster[0].price, "knee")
    cheapest = _analysed(spec, wire.Price(usd_per_gb_hour=USD_PER_GB_HOUR), "cost")
    chosen, paid = knee.choice.chosen, cheapest.choice.chosen
    assert chosen is not None, f"{name}: nothing was chosen, and the job has no limits"
    assert paid is not None, f"{name}: nothing was chosen, and the job has no limits"
    by_batch = {each.configuration.global_batch_size: each.time_s.mean for each in knee.estimates}
    return Row(
        chosen.configuration.global_batch_size,
        paid.configuration.global_batch_size,
        by_batch[min(by_batch)] / chosen.time_s.mean,
        max(by_batch),
    )


def _analysed(spec: wire.JobSpec, price: wire.Price, objective: wire.Objective) -> Answer:
    cluster = spec.cluster[0].model_copy(update={"min_nodes": NODES, "price": price})
    found = analyse(JobData(spec.model_copy(update={"cluster": [cluster]}), objective, data_version=0))
    assert isinstance(found, Answer), f"{spec.name}: {found.reason}"
    return found


def rows() -> list[tuple[str, ...]]:
    """The table under HEADER."""
    found = []
    for name, paper in PAPER.items():
        ours = answer(name)
        found.append(
            (
                name,
                *(str(each) for each in (paper.knee, ours.knee, paper.least_cost, ours.least_cost)),
                f"{paper.speed_up:g}",
                f"{ours.speed_up:.1f}",
                str(ours.largest),
            )
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; answers the exit status."""
    options = parser_of("paper_answers", __doc__).parse_args(arguments)
    table = rows()
    print_table(f"first answers on {NODES} nodes, before any run", HEADER, table)
    keys = ("knee", "least_cost", "speed_up", "largest_batch")
    figures = {
        f"answers.{row[0]}.{key}": float(row[i]) for row in table for key, i in zip(keys, (2, 4, 6, 7), strict=True)
    }
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
