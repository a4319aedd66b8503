"""Measures how wrong the first prediction of a step time is, with and without a history of earlier jobs.

    python -m benchmarks.cold_start [--steps FILE] [--json OUT] [--draws 20] [--smoke]

FILE contains step times on a single device. It has the columns of tests/data/single_device.csv, and optionally
`activation_elements_per_sample` (the number of outputs of layers) and other fields of `model` in job.toml. The
product's own prior predicts every row twice: from hardware figures alone, and with a history of earlier jobs. Histories
are drawn at random (the same in every run) from other networks of the same source: `here` is the number of earlier jobs
on the same GPU, and `elsewhere` the number on other GPUs. The jobs have the `same` precision as the target, or `any`.
The keys `cold.<precision>.<here>.<elsewhere>.median` and `.p90` are the median and the 90th percentile of the factor by
which the guess is wrong, minus 1 (0.5: the true time is 50 % longer than the guess, or a third shorter), and
`.coverage` is the coverage of the guesses' 90 % intervals. `.without` is the median for the same targets if they are
guessed from hardware figures alone. Histories for which there are too few rows are left out. Without history,
`cold.all.median` and `.p90` cover every batch in FILE, and `cold.small.*` cover batches of up to 32; all other figures
cover the largest batch of each network. `cold.mixed.0.0.median` and `.p90` cover the mixed-precision rows of FILE
without history; if FILE is not given, they cover timm's 765 rows on one RTX 3090, to which the product's constants were
fitted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tula_wire as wire
from benchmarks.support.grids import DATA, read_rows
from benchmarks.support.report import make_parser, mean, median, percentile, print_table, write_json
from tula_service.analysis.hardware import BYTES_PER_NUMBER, RECOMPUTED, look_up_hardware, read_facts, slow_from
from tula_service.perfmodel.points import Points
from tula_service.perfmodel.priors import (
    ScaleError,
    StepTimePrior,
    prior_from_hardware,
    scale_from_jobs,
)
from tula_service.perfmodel.step_time_form import log_terms
from tula_wire.jobs import Precision

TABLE = DATA / "single_device.csv"
FAMILIES = DATA / "single_device_families.csv"
PRECISIONS: dict[str, Precision] = {
    "single": "fp32", "mixed": "fp16", "fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16",
}  # fmt: skip
MIXED = ("mixed", "fp16", "bf16")
SEED = 7
HISTORIES = ((0, 0), (0, 1), (0, 5), (1, 0), (2, 0), (3, 0), (3, 5))  # jobs on the same GPU, on others
_NORMAL_90 = 1.645
_SMALL_BATCH = 32.0
KEPT_PER_OUTPUT = 2.0
"""Number of elements that autograd keeps for each output of a layer: one of a convolution and one of its activation."""


@dataclass(frozen=True)
class Timing:
    """The guess for one network on one device, and the logarithm of the measured time divided by the guessed time."""

    source: str
    gpu: str
    network: str
    precision: str
    batch: float
    guess: StepTimePrior
    log_ratio: float


def parse_precision(row: Mapping[str, str]) -> Precision:
    """Return the row's precision, named as in a specification. Raises ValueError for an unknown name."""
    if row["precision"] not in PRECISIONS:
        raise ValueError(f"precision {row['precision']!r} is unknown: use one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[row["precision"]]


def read(path: Path) -> list[Timing]:
    """Return every row with its prediction from hardware figures; skip devices without a data sheet."""
    timings = []
    for row in read_rows(path):
        precision = parse_precision(row)
        cluster = wire.ClusterSpec(instance_type="one", max_nodes=1, accelerator=row["gpu"])
        hardware = look_up_hardware(cluster, precision)
        if hardware.peak_tflops is None:
            continue
        outputs = float(row.get("activation_elements_per_sample") or 0.0)
        kept = round(KEPT_PER_OUTPUT * BYTES_PER_NUMBER[precision] * outputs)
        transposed = row.get("transposed_elements_per_sample")
        checkpointing = row.get("activation_checkpointing") == "1"
        model = wire.ModelSpec(
            name=row["network"],
            parameters=round(float(row["parameters"])),
            # The FLOPs in a table include recomputation by checkpointing; the FLOPs in a specification do not.
            flops_per_sample=3.0 * float(row["flops_per_sample"]) / (RECOMPUTED if checkpointing else 1.0),
            precision=precision,
            activation_bytes_per_sample=kept or None,
            operations_per_step=int(row.get("operations_per_step") or 0) or None,
            convolution_elements_per_sample=int(row.get("convolution_elements_per_sample") or 0) or None,
            transposed_elements_per_sample=round(float(transposed)) if transposed else None,
            activation_checkpointing=checkpointing,
        )
        batch = float(row["local_batch_size"])
        guess = prior_from_hardware(read_facts(model), hardware, reference_batch_size=batch)
        guess = replace(guess, slow_from=slow_from(model, [cluster]).get(cluster.instance_type, math.inf))
        log_ratio = math.log(float(row["step_time_s"])) - log_step_s(guess)
        timings.append(Timing(row["source"], row["gpu"], row["network"], row["precision"], batch, guess, log_ratio))
    return timings


def of_largest_batch(timings: Sequence[Timing]) -> list[Timing]:
    """Return the rows with the largest batch of each network and precision on each device, in the given order."""
    largest: dict[tuple[str, ...], float] = {}
    for timing in timings:
        largest[_of(timing)] = max(timing.batch, largest.get(_of(timing), 0.0))
    return [timing for timing in timings if timing.batch == largest[_of(timing)]]


def _of(timing: Timing) -> tuple[str, ...]:
    return timing.source, timing.gpu, timing.network, timing.precision


def every_batch(timings: Sequence[Timing]) -> dict[str, float]:
    """Return the errors of guesses without a history, over all batches and over small batches."""
    figures: dict[str, float] = {}
    for name, most in (("all", math.inf), ("small", _SMALL_BATCH)):
        factors = [math.exp(abs(timing.log_ratio)) - 1.0 for timing in timings if timing.batch <= most]
        if factors:
            figures |= {f"cold.{name}.median": median(factors), f"cold.{name}.p90": percentile(factors, 0.9)}
    return figures


def log_step_s(guess: StepTimePrior) -> float:
    """Return the logarithm of the guessed step time on one device, at the guess's reference batch size."""
    batch = float(guess.reference_batch_size or 1.0)
    point = Points(num_nodes=[1.0], world_size=[1.0], local_batch_size=[batch])
    return float(log_terms(guess.without_accumulation().mean, point, batch, guess.slow_from).compute[0])


def mixed(timings: Sequence[Timing]) -> dict[str, float]:
    """Return the errors for the rows in mixed precision, guessed without a history; empty if there are no such rows."""
    factors = [math.exp(abs(timing.log_ratio)) - 1.0 for timing in timings if timing.precision in MIXED]
    if not factors:
        return {}
    return {"cold.mixed.0.0.median": median(factors), "cold.mixed.0.0.p90": percentile(factors, 0.9)}


def histories(
    timings: Sequence[Timing], num_same_gpu: int, num_other_gpu: int, same: bool, draws: int, every: int = 1
) -> Iterator[tuple[Timing, list[Timing]]]:
    """Yield every `every`-th row with `draws` histories of other networks, if there are enough jobs to draw from."""
    dice = random.Random(SEED)
    for target in timings[::every]:
        others = [
            timing
            for timing in timings
            if timing.source == target.source
            and timing.network != target.network
            and (timing.precision == target.precision or not same)
        ]
        near = [timing for timing in others if timing.gpu == target.gpu]
        far = [timing for timing in others if timing.gpu != target.gpu]
        if len(near) >= num_same_gpu and len(far) >= num_other_gpu:
            for _ in range(draws):
                yield target, dice.sample(near, num_same_gpu) + dice.sample(far, num_other_gpu)


def score(
    timings: Sequence[Timing], num_same_gpu: int, num_other_gpu: int, same: bool, draws: int, every: int = 1
) -> dict[str, float]:
    """Return the errors and coverage over all targets and their histories; empty if no target has a history."""
    factors, inside, without = [], [], []
    for target, history in histories(timings, num_same_gpu, num_other_gpu, same, draws, every):
        earlier = [ScaleError(timing.log_ratio, timing.gpu, rule_sd=float(timing.guess.sd[0])) for timing in history]
        own = float(target.guess.sd[0])
        corrected = scale_from_jobs(target.guess, ScaleError(0.0, target.gpu, rule_sd=own), earlier)
        off = abs(target.log_ratio + log_step_s(target.guess) - log_step_s(corrected))
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
    """Run the benchmark; return the exit status."""
    parser = make_parser("cold_start", __doc__)
    parser.add_argument("--steps", type=Path, help="table of single-device step times (CSV)")
    parser.add_argument("--only", action="append", default=[], help="use only rows of this source (repeatable)")
    parser.add_argument("--draws", type=int, default=20, help="number of histories drawn for each row (20)")
    options = parser.parse_args(arguments)
    draws, every = (1, 5) if options.smoke else (options.draws, 1)
    try:
        timings = read(options.steps or TABLE)
        families = read(FAMILIES) if options.steps is None else timings
    except ValueError as error:
        parser.error(f"--steps: {error}")
    timings = [timing for timing in timings if not options.only or timing.source in options.only]
    if not timings:
        parser.error("no row matches: check --steps and --only.")
    figures = mixed(of_largest_batch(families)) | every_batch(timings)
    timings = of_largest_batch(timings)
    rows = []
    for same in (True, False):
        for num_same_gpu, num_other_gpu in HISTORIES:
            scores = score(timings, num_same_gpu, num_other_gpu, same, draws, every)
            if not scores:
                continue
            figures |= scores
            cases, middle, tail, coverage, without = scores.values()
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
    print_table("factor by which the first guess of a step time is wrong", header, rows)
    for key in (key for key in figures if key.startswith(("cold.mixed.0.0.", "cold.all.", "cold.small."))):
        print(f"{key}: x {1.0 + figures[key]:.2f}")
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
