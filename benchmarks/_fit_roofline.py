"""Fits the numbers of `perfmodel/priors.py` to step times of single devices, and scores them with families left out.

    python -m benchmarks._fit_roofline [--json OUT]

The smooth absolute error of the log step time is least; rows of many devices weigh four times those of one. Scores
are the factor less 1 by which a step time is off, with each family of networks (timm) or device (others) left out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from sklearn.linear_model import LinearRegression

import tula_wire as wire
from benchmarks.cold_start import FAMILIES, TABLE, precision_of
from benchmarks.support.grids import read_rows
from benchmarks.support.report import median, percentile, print_table, write_json
from tula_service.analysis.priors import BYTES_PER_NUMBER, hardware_of
from tula_service.perfmodel.priors import FLOOR_S, KEPT_PER_OUTPUT

Array: TypeAlias = npt.NDArray[np.float64]
WEIGHT_OF_DEVICES, WEIGHT_OF_NETWORKS = 4.0, 10.0
OUTPUTS = {
    "alexnet": 0.5e6, "caffenet": 0.66e6, "vgg16": 13.6e6, "vgg19": 14.9e6, "resnet50": 11.1e6, "resnet101": 16.2e6,
    "resnet152": 22.6e6, "resnet200": 28e6, "inception3": 9e6, "inception4": 15.1e6, "inceptionbn": 6.8e6, "nin": 1.5e6,
    "bertbase": 10.5e6,
}  # fmt: skip
"""Outputs of layers for one sample, of the networks in tests/data/single_device.csv: counted by hand from their
layers, and not compared with a trace."""


def read(path: Path) -> tuple[list[dict[str, str]], Array, Array]:
    """Rows, seconds of each term at a coefficient of 1, and step times in seconds."""
    rows: list[dict[str, str]] = []
    terms: list[list[float]] = []
    for row in read_rows(path):
        precision = precision_of(row)
        on = wire.ClusterSpec(max_nodes=1, accelerator=row["gpu"])
        hardware = hardware_of(on, precision)
        if hardware.peak_tflops is None or hardware.memory_gb_per_s is None:
            continue
        batch, bandwidth = float(row["local_batch_size"]), hardware.memory_gb_per_s * 1e9
        outputs = float(row.get("activation_elements_per_sample") or OUTPUTS[row["network"]])
        kept = KEPT_PER_OUTPUT * BYTES_PER_NUMBER[precision] * outputs
        arithmetic = 3.0 * float(row["flops_per_sample"]) * batch / (hardware.peak_tflops * 1e12)
        terms.append([arithmetic, kept * batch / bandwidth, 4.0 * float(row["parameters"]) / bandwidth])
        rows.append(dict(row))
    return rows, np.array(terms), np.array([float(row["step_time_s"]) for row in rows])


def fit(terms: Array, seconds: Array, weights: Array) -> Array:
    """The three coefficients, all positive."""

    def missed(logs: Array) -> Array:
        return np.asarray(np.sqrt(weights) * (np.log(terms @ np.exp(logs) + FLOOR_S) - np.log(seconds)))

    found = least_squares(missed, np.log([0.6, 18.0, 20.0]), loss="soft_l1", f_scale=0.15)
    return np.asarray(np.exp(found.x))


def fit_activations(rows: Sequence[dict[str, str]]) -> Array:
    """g0, g1, g2 of `guessed_activation_bytes`; a network counts once."""
    seen = {row["network"]: row for row in rows}
    outputs = [float(row.get("activation_elements_per_sample") or OUTPUTS[name]) for name, row in seen.items()]
    counts = np.log([[float(row["flops_per_sample"]), float(row["parameters"])] for row in seen.values()])
    weights = [WEIGHT_OF_NETWORKS if name in OUTPUTS else 1.0 for name in seen]
    found = LinearRegression().fit(counts, np.log(KEPT_PER_OUTPUT * np.array(outputs)), sample_weight=weights)
    return np.array([found.intercept_, *found.coef_])


def figures() -> dict[str, float]:
    """The numbers of the roofline, and how far it is off (factor less 1) with each family or device left out."""
    (families, of_families, taken), (others, of_devices, took) = read(FAMILIES), read(TABLE)
    rows, terms = [*families, *others], np.vstack([of_families, of_devices])
    seconds = np.r_[taken, took]
    weights = np.r_[np.ones(len(taken)), np.full(len(took), WEIGHT_OF_DEVICES)]
    groups = np.array([row.get("family") or row["gpu"] for row in rows])
    kinds = np.array([f"{'timm' if 'family' in row else 'devices'}.{row['precision']}" for row in rows])
    held_out = np.zeros(len(rows))
    for group in sorted(set(groups)):
        left = groups == group
        others_say = fit(terms[~left], seconds[~left], weights[~left])
        held_out[left] = np.abs(np.log(terms[left] @ others_say + FLOOR_S) - np.log(seconds[left]))
    found = dict(zip(("arithmetic", "activations", "parameters"), fit(terms, seconds, weights), strict=True))
    found |= dict(zip(("guess.0", "guess.1", "guess.2"), fit_activations(rows), strict=True))
    for kind in sorted(set(kinds)):
        factors = [math.exp(each) - 1.0 for each in held_out[kinds == kind]]
        found |= {f"{kind}.median": median(factors), f"{kind}.p90": percentile(factors, 0.9)}
    return {name: float(value) for name, value in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit and score; answers the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._fit_roofline", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    options = parser.parse_args(arguments)
    values = figures()
    print_table("roofline", ["figure", "value"], [[name, f"{value:.4g}"] for name, value in values.items()])
    if options.json:
        write_json(options.json, values)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
