"""Predicts the memory of the largest batch from readings at the two smallest batches of measured workloads.

    python -m benchmarks.memory [--grids FILE] [--json OUT] [--smoke]

Which readings are valid depends only on the readings, never on the model. When a step runs out of memory, the reading
shows only how much was in use until then. Therefore a workload's readings end before the first reading that (1) does
not rise, (2) is within 5 % of the device's capacity, or (3) is above 70 % of the capacity and adds less than 0.7 times
as many bytes per example as the previous reading did (work space shrinks when memory is short). Workloads with fewer
than three valid readings are counted but not scored. `memory.raw.*` are the same figures without rules 2 and 3. If the
table has a column `analytic_bytes` (a count of tensors), `memory.analytic.*` are the figures with the slope of this
count as the prior's slope, and `memory.counted_one.*` are the figures with this prior if only the smallest batch is
read (`python -m benchmarks._count_memory` writes such a table). `memory.three.*` are predicted from the three smallest
batches, and `memory.apart.*` from the batches b and 4 b, for workloads whose largest batch is at least 16 b.

The agent counts static memory: parameters, gradients, optimizer state and context. If the table has a column
`parameters`, static memory is estimated as a multiple of the parameters' bytes plus a constant (the context). The
multiple and the constant are fitted to the readings of all other families of networks on the device.
`memory.uncounted.*` are the figures without static memory. Networks whose names begin with the same letters form a
family.

For `ceiling.*`, the largest reading is taken as the capacity, and the two smallest batches are read. `ceiling.median`
and `ceiling.worst` are the errors of the batch that is predicted to fit with a probability of 50 %. `ceiling.unsafe` is
the share of workloads whose promised batch (which fits with a probability of 95 %) is larger than the batch of the
largest reading, and `ceiling.used` is the median of the promised batch divided by the batch of the largest reading. All
figures are fractions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.support.grids import MEMORY_TABLE, MemoryWorkload, grids_parser, read_memory
from benchmarks.support.report import mean, median, percentile, print_table, write_json
from tula_service.perfmodel.memory_model import MemoryObservations, fit_memory

_GIB = 2.0**30
_FULL, _CROWDED, _FLATTENED = 0.95, 0.7, 0.7
_SAFETY = 0.95
_SMOKE = 4  # workloads of a smoke run
_FEWEST_OTHERS = 10  # networks of other families that are needed to estimate static memory
_APART = 4


def capacity_bytes(gpu: str) -> float:
    """Return the capacity that the GPU's name states (as in "A100-40GB"), or infinity if the name states none."""
    match = re.search(r"(\d+)GB", gpu)
    return float(match.group(1)) * _GIB if match else float("inf")


def valid_readings(workload: MemoryWorkload, *, near_capacity: bool = True) -> int:
    """Return the number of batches, in ascending order, whose readings are not affected by a lack of memory."""
    batches, read, capacity = workload.local_batch_size, workload.memory_bytes, capacity_bytes(workload.gpu)
    for row in range(1, len(read)):
        if read[row] <= read[row - 1]:
            return row
        if not near_capacity:
            continue
        if read[row] >= _FULL * capacity:
            return row
        if row > 1 and read[row] > _CROWDED * capacity:
            rise = (read[row] - read[row - 1]) / (batches[row] - batches[row - 1])
            before = (read[row - 1] - read[row - 2]) / (batches[row - 1] - batches[row - 2])
            if rise < _FLATTENED * before:
                return row
    return len(read)


def analytic_slope(workload: MemoryWorkload) -> float | None:
    """Return the counted bytes per example between the two smallest batches, or None if there are no counts."""
    if workload.analytic_bytes is None:
        return None
    first, second = workload.analytic_bytes[:2]
    slope = (second - first) / (workload.local_batch_size[1] - workload.local_batch_size[0])
    return slope if slope > 0.0 else None


def static_bytes(workloads: Sequence[MemoryWorkload]) -> dict[str, float]:
    """Return each workload's bytes at a batch of 0, estimated from other families on the device, if there are enough.

    The fit minimises the sum of absolute relative errors, since some lines are far off because their readings jump.
    """
    from sklearn.linear_model import QuantileRegressor  # takes two seconds, and only this function needs it

    rows = []
    for workload in workloads:
        if workload.parameters is None:
            continue
        valid = valid_readings(workload)
        batches, read = np.array(workload.local_batch_size[:valid]), np.array(workload.memory_bytes[:valid])
        start = float(np.polyfit(batches, read, 1, w=1.0 / read)[1]) if valid > 2 else 0.0
        rows.append((workload, _family(workload.name), start))
    by_workload = {}
    for gpu, family in {(workload.gpu, family) for workload, family, _ in rows}:
        others = [(w.parameters, start) for w, f, start in rows if f != family and w.gpu == gpu and start > 0.0]
        if len(others) < _FEWEST_OTHERS:
            continue
        parameters, starts = np.array(others).T
        fit = QuantileRegressor(alpha=0.0).fit(parameters[:, None] / 1e6, starts / _GIB, sample_weight=_GIB / starts)
        for workload in (w for w, f, _ in rows if (w.gpu, f) == (gpu, family)):
            millions = workload.parameters / 1e6  # type: ignore[operator]
            by_workload[workload.name] = float(fit.predict([[millions]])[0]) * _GIB
    return by_workload


def _family(name: str) -> str:
    """Return the letters at the beginning of a network's name.

    A workload's name is SOURCE/.../NETWORK/PRECISION or SOURCE/NETWORK.
    """
    parts = name.lower().split("/")
    letters = re.match("[a-z]+", parts[-2] if len(parts) > 2 else parts[-1])
    return letters.group() if letters else name


def first_readings(batches: Sequence[int], known: int, *, apart: bool) -> list[int]:
    """Return the rows to read: the `known` smallest batches or, if `apart`, a batch and four times this batch."""
    if not apart:
        return list(range(known)) if len(batches) > known else []
    for row, batch in enumerate(batches):
        if _APART * batch in batches and batches[-1] >= _APART**2 * batch:
            return [row, batches.index(_APART * batch)]
    return []


def score(
    workloads: Sequence[MemoryWorkload],
    prefix: str,
    static: Mapping[str, float],
    *,
    near_capacity: bool = True,
    analytic: bool = False,
    known: int = 2,
    apart: bool = False,
) -> dict[str, float]:
    """Return the errors at the largest batch and at all unread batches, and the coverage of the 90 % intervals."""
    largest, beyond, inside, linear = [], [], [], []
    for workload in workloads:
        valid = valid_readings(workload, near_capacity=near_capacity)
        batches, read = workload.local_batch_size[:valid], np.array(workload.memory_bytes[:valid])
        rows = first_readings(batches, known, apart=apart)
        if not rows:
            continue
        slope = analytic_slope(workload) if analytic else None
        first = np.array(batches, dtype=np.float64)[rows]
        counted = static.get(workload.name)
        model = fit_memory(MemoryObservations(first, read[rows], static_bytes=counted, bytes_per_sample=slope))
        predicted = [model.predict(batch) for batch in batches[rows[-1] + 1 :]]
        errors = abs(np.array([interval.mean for interval in predicted]) / read[rows[-1] + 1 :] - 1.0)
        largest.append(float(errors[-1]))
        beyond.extend(errors.tolist())
        inside.append(float(predicted[-1].low <= read[-1] <= predicted[-1].high))
        line = (read[1] - read[0]) / (batches[1] - batches[0])
        linear.append(abs((read[1] + line * (batches[-1] - batches[1])) / read[-1] - 1.0))
    if not largest:
        return {}
    return {
        f"{prefix}.workloads": float(len(largest)),
        f"{prefix}.unscored": float(len(workloads) - len(largest)),
        f"{prefix}.largest.median": median(largest),
        f"{prefix}.largest.p90": percentile(largest, 0.9),
        f"{prefix}.largest.coverage": mean(inside),
        f"{prefix}.beyond.median": median(beyond),
        f"{prefix}.beyond.p90": percentile(beyond, 0.9),
        f"{prefix}.line.median": median(linear),
        f"{prefix}.line.p90": percentile(linear, 0.9),
    }


def ceiling(workloads: Sequence[MemoryWorkload], static: Mapping[str, float]) -> dict[str, float]:
    """Predict the largest batch from the two smallest batches; return errors, and how often a promise does not hold."""
    offs, shares = [], []
    for workload in workloads:
        valid = valid_readings(workload)
        if valid < 3:
            continue
        batches, read = np.array(workload.local_batch_size[:valid]), np.array(workload.memory_bytes[:valid])
        model = fit_memory(MemoryObservations(batches[:2], read[:2], static_bytes=static.get(workload.name)))
        expected, promised = (model.max_local_batch_size(read[-1], safety_probability=p) for p in (0.5, _SAFETY))
        offs.append(abs(expected / batches[-1] - 1.0))
        shares.append(promised / batches[-1])
    return {
        "ceiling.median": median(offs),
        "ceiling.p90": percentile(offs, 0.9),
        "ceiling.worst": max(offs),
        "ceiling.unsafe": mean([float(share > 1.0) for share in shares]),
        "ceiling.used": median(shares),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = grids_parser("memory", __doc__, MEMORY_TABLE)
    options = parser.parse_args(arguments)
    workloads = read_memory(options.grids)[: _SMOKE if options.smoke else None]
    if not workloads:
        parser.error("the table has no workload: check --grids.")
    static = static_bytes(workloads)
    figures = score(workloads, "memory", static) | score(workloads, "memory.raw", static, near_capacity=False)
    figures |= score(workloads, "memory.three", static, known=3) | score(workloads, "memory.uncounted", {})
    figures |= score(workloads, "memory.apart", static, apart=True) | ceiling(workloads, static)
    kinds = [("valid readings", "memory"), ("all rising readings", "memory.raw"), ("three smallest", "memory.three")]
    kinds += [("static not counted", "memory.uncounted"), ("batches b and 4 b", "memory.apart")]
    counted = [workload for workload in workloads if analytic_slope(workload) is not None]
    if counted:
        figures |= score(counted, "memory.analytic", static, analytic=True)
        figures |= score(counted, "memory.counted_one", static, analytic=True, known=1)
        kinds += [("with a counted slope", "memory.analytic"), ("smallest, counted slope", "memory.counted_one")]
    rows = [
        [name, f"{figures[f'{prefix}.workloads']:.0f}"]
        + [f"{100 * figures[f'{prefix}.{part}']:.1f} %" for part in ("largest.median", "largest.p90")]
        + [f"{100 * figures[f'{prefix}.{part}']:.1f} %" for part in ("largest.coverage", "line.median", "line.p90")]
        for name, prefix in kinds
        if f"{prefix}.workloads" in figures
    ]
    header = ["two smallest -> largest", "workloads", "median", "p90", "coverage", "line: median", "p90"]
    print_table("memory", header, rows)
    print("; ".join(f"{name} {value:.3f}" for name, value in figures.items() if name.startswith("ceiling")))
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
