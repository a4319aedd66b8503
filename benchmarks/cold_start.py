"""How far the first guess of a step time is off, before any run: from hardware figures alone, and after earlier jobs.

    python -m benchmarks.cold_start [--steps FILE] [--json OUT] [--draws 20] [--smoke]

FILE has single-device step times (columns as tests/data/single_device.csv). Every row is guessed by the product's own
prior, with and without histories drawn at random (the same in every run) from other networks of the same source:
`here` is the number of jobs on the same GPU, `elsewhere` on others; `same` precision, or `any`. Keys are
`cold.<precision>.<here>.<elsewhere>.median` and `.p90` of the factor by which the guess is off, less 1 (0.5: half as
long again, or by a third too short), and `.coverage` of its 90 % intervals. `.without` is the median factor of the same
targets from hardware figures alone. A history that no row has is left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tula_wire as wire
from benchmarks.support.grids import DATA, read_rows
from benchmarks.support.report import mean, median, parser_of, percentile, print_table, write_json
from tula_service.analysis.priors import hardware_of
from tula_service.perfmodel.priors import EarlierScale, ModelFacts, StepTimePrior, prior_from_hardware, scale_from_jobs

TABLE = DATA / "single_device.csv"
SEED = 7
HISTORIES = ((0, 0), (0, 1), (0, 5), (1, 0), (2, 0), (3, 0), (3, 5))  # jobs on the same GPU, on others
_NORMAL_90 = 1.645


@dataclass(frozen=True)
class Timing:
    """One network on one device: its guess, and log(measured / guess)."""

    source: str
    gpu: str
    network: str
    precision: str
    guess: StepTimePrior
    log_ratio: float


def read(path: Path) -> list[Timing]:
    """Every row with its guess from hardware figures; devices that no data sheet is kept of are left out."""
    found = []
    for row in read_rows(path):
        hardware = hardware_of(wire.ClusterSpec(instance_type="one", max_nodes=1, accelerator=row["gpu"]))
        if hardware.peak_tflops is None:
            continue
        facts = ModelFacts(float(row["parameters"]), float(row["flops_per_sample"]))
        guess = prior_from_hardware(facts, hardware, reference_batch_size=float(row["local_batch_size"]))
        measured = math.log(float(row["step_time_s"]))
        found.append(
            Timing(row["source"], row["gpu"], row["network"], row["precision"], guess, measured - float(guess.mean[0]))
        )
    return found


def histories(
    timings: Sequence[Timing], num_same_gpu: int, num_other_gpu: int, same: bool, draws: int
) -> Iterator[tuple[Timing, list[Timing]]]:
    """Each row with `draws` histories of other networks, where there are enough to draw from."""
    dice = random.Random(SEED)
    for target in timings:
        others = [
            each
            for each in timings
            if each.source == target.source
            and each.network != target.network
            and (each.precision == target.precision or not same)
        ]
        near = [each for each in others if each.gpu == target.gpu]
        far = [each for each in others if each.gpu != target.gpu]
        if len(near) >= num_same_gpu and len(far) >= num_other_gpu:
            for _ in range(draws):
                yield target, dice.sample(near, num_same_gpu) + dice.sample(far, num_other_gpu)


def score(timings: Sequence[Timing], num_same_gpu: int, num_other_gpu: int, same: bool, draws: int) -> dict[str, float]:
    """Errors and coverage over all targets and histories; empty where no target has such a history."""
    factors, inside, without = [], [], []
    for target, history in histories(timings, num_same_gpu, num_other_gpu, same, draws):
        earlier = [EarlierScale(each.log_ratio, each.gpu) for each in history]
        corrected = scale_from_jobs(target.guess, earlier, device=target.gpu)
        off = abs(target.log_ratio + float(target.guess.mean[0] - corrected.mean[0]))
        factors.append(math.exp(off) - 1.0)
        inside.append(float(off < _NORMAL_90 * float(corrected.sd[0])))
        without.append(math.exp(abs(target.log_ratio)) - 1.0)
    if not factors:
        return {}
    prefix = f"cold.{'same' if same else 'any'}.{num_same_gpu}.{num_other_gpu}"
    return {
        f"{prefix}.cases": float(len(factors)),
        f"{prefix}.median": median(factors),
        f"{prefix}.p90": percentile(factors, 0.9),
        f"{prefix}.coverage": mean(inside),
        f"{prefix}.without": median(without),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; answers the exit status."""
    parser = parser_of("cold_start", __doc__)
    parser.add_argument("--steps", type=Path, default=TABLE, help="table of single-device step times (CSV)")
    parser.add_argument("--only", action="append", default=[], help="only rows of this source")
    parser.add_argument("--draws", type=int, default=20, help="histories drawn for each row (20)")
    options = parser.parse_args(arguments)
    draws = 1 if options.smoke else options.draws
    timings = [each for each in read(options.steps) if not options.only or each.source in options.only]
    if not timings:
        parser.error("no row is left; check --steps and --only.")
    figures: dict[str, float] = {}
    rows = []
    for same in (True, False):
        for num_same_gpu, num_other_gpu in HISTORIES:
            found = score(timings, num_same_gpu, num_other_gpu, same, draws)
            if not found:
                continue
            figures |= found
            cases, middle, tail, coverage, without = found.values()
            cells = [f"x {1.0 + value:.2f}" for value in (middle, tail, without)]
            rows.append(
                [
                    "same" if same else "any",
                    str(num_same_gpu),
                    str(num_other_gpu),
                    f"{cases:.0f}",
                    *cells,
                    f"{100 * coverage:.0f} %",
                ]
            )
    header = ["precision", "jobs here", "elsewhere", "cases", "median", "p90", "without", "coverage"]
    print_table("first guess of a step time: off by a factor of", header, rows)
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
