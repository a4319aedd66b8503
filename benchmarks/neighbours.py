"""The step-time model of Pollux beside ours, fitted to the same runs of the same measured workloads.

    python -m benchmarks.neighbours [--grids FILE] [--sync FILE]... [--json OUT] [--jobs N] [--smoke]

Pollux (Qiao et al., OSDI 2021, section 3.2) describes a step as

    t      = (T_grad^g + T_sync^g)^(1/g),  1 <= g <= 10          T_grad = a + b * local batch
    T_sync = 0 for one rank, a_l + b_l (K - 2) for K ranks in one node, a_n + b_n (K - 2) over several nodes

and fits its seven non-negative parameters by the root mean square of the log error of t and, where sync was measured,
of T_grad, plus the two penalties of its implementation (AdaptDL): 0.001 (g - 1)^2, and 0.01 times the squares of
b_l / a_l and b_n / a_n. This is our own code from those equations; it is given several starts and keeps the best, and
where no run tells a part of T_sync, the other part stands in for it, which is kinder than Pollux's own rule (zero until
seen). Keys are `<grid>.<runs>.pollux.median`, `.p90` and the same for `tula`: over workloads, of the median error on
configurations that were not profiled, as a fraction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from benchmarks.step_time import corners, designed, held_out
from benchmarks.support.grids import Placement, Workload, over_workloads, workloads_parser
from benchmarks.support.report import median, percentile, print_table, write_json

RUNS = ("corners", "planned4", "planned6")
_MOST_OVERLAP = 10.0
_OVERLAP_PENALTY, _GROWTH_PENALTY = 1e-3, 1e-2
_SMALLEST = 1e-9  # of the largest step: nothing is quite zero in a logarithm
_STARTS = ((0.2, 0.8, 0.1, 0.0, 1.5), (0.5, 0.5, 0.5, 0.1, 2.0), (0.1, 0.9, 0.02, 0.01, 5.0), (0.3, 0.3, 0.7, 0.0, 1.0))
"""Floor, growth at the largest batch, first and further ranks' sync as shares of the largest step; overlap."""

Floats = npt.NDArray[np.float64]


class Pollux:
    """The fitted form; parameters (a, b, a_l, b_l, a_n, b_n, g) in the units of seconds and examples."""

    def __init__(self, runs: Sequence[Placement], step_time_s: Sequence[float], sync_time_s: Sequence[float]) -> None:
        """Fit to a few runs; a sync time is NaN where it was not measured."""
        seconds = np.log(np.asarray(step_time_s, dtype=np.float64))
        self.unit_s, self.unit_batch = float(np.exp(seconds.max())), max(c.local_batch_size for c in runs)
        self.local = any(c.num_nodes == 1 and c.world_size > 1 for c in runs)
        self.between = any(c.num_nodes > 1 for c in runs)
        ranks = max(c.world_size for c in runs)
        compute = np.exp(seconds) - np.asarray(sync_time_s, dtype=np.float64)
        timed = np.flatnonzero(compute > 0.0)

        def loss(parameters: Floats) -> float:
            total, grad = self._seconds(parameters, runs)
            error = _root_mean_square(np.log(total) - seconds)
            if timed.size:
                error += _root_mean_square(np.log(grad[timed] / compute[timed]))
            _, _, a_local, b_local, a_nodes, b_nodes, overlap = parameters
            growth = (b_local / a_local) ** 2 + (b_nodes / a_nodes) ** 2
            return float(error + _OVERLAP_PENALTY * (overlap - 1.0) ** 2 + _GROWTH_PENALTY * growth)

        bounds = [(_SMALLEST, None)] * 6 + [(1.0, _MOST_OVERLAP)]
        starts = [
            [a, b, first, further / ranks, first, further / ranks, overlap] for a, b, first, further, overlap in _STARTS
        ]
        fits = [minimize(loss, np.maximum(start, _SMALLEST), method="L-BFGS-B", bounds=bounds) for start in starts]
        self.parameters: Floats = min(fits, key=lambda fit: float(fit.fun)).x

    def predict(self, configurations: Sequence[Placement]) -> Floats:
        """Seconds per step, shape (n,)."""
        return self._seconds(self.parameters, configurations)[0]

    def _seconds(self, parameters: Floats, at: Sequence[Placement]) -> tuple[Floats, Floats]:
        """t and T_grad, shape (n,) each."""
        a, b, a_local, b_local, a_nodes, b_nodes, overlap = parameters
        if not self.local:
            a_local, b_local = a_nodes, b_nodes
        if not self.between:
            a_nodes, b_nodes = a_local, b_local
        batch = np.array([c.local_batch_size for c in at]) / self.unit_batch
        ranks = np.array([c.world_size for c in at], dtype=np.float64)
        several = np.array([c.num_nodes > 1 for c in at])
        sync = np.where(several, a_nodes + b_nodes * (ranks - 2.0), a_local + b_local * (ranks - 2.0))
        sync = np.where(ranks > 1.0, sync, _SMALLEST)
        grad: Floats = a + b * batch
        return self.unit_s * (grad**overlap + sync**overlap) ** (1.0 / overlap), self.unit_s * grad


def _root_mean_square(values: Floats) -> float:
    return float(np.sqrt(np.mean(values**2)))


def compare(workload: Workload) -> dict[str, tuple[float, float]]:
    """By runs: the median error of Pollux's form and of ours on what was not profiled."""
    profiled = {
        "corners": corners(workload),
        "planned4": designed(workload, 4),
        "planned6": designed(workload, 6),
    }
    found = {}
    for name, runs in profiled.items():
        rest = [c for c in workload.candidates if c not in set(runs)]
        actual = np.array([workload.step_time_s[c] for c in rest])
        theirs = Pollux(runs, [workload.step_time_s[c] for c in runs], workload.measured_sync(runs)).predict(rest)
        found[name] = (median(np.abs(theirs / actual - 1.0)), median(held_out(workload, runs)[0]))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; answers the exit status."""
    options, results = over_workloads(workloads_parser("neighbours", __doc__), compare, arguments)
    figures: dict[str, float] = {}
    rows = []
    for grid in sorted({w.grid for w, _ in results}, reverse=True):
        for runs in RUNS:
            pairs = [found[runs] for w, found in results if w.grid == grid]
            for position, name in enumerate(("pollux", "tula")):
                errors = [pair[position] for pair in pairs]
                figures[f"{grid}.{runs}.{name}.median"] = median(errors)
                figures[f"{grid}.{runs}.{name}.p90"] = percentile(errors, 0.9)
            figures[f"{grid}.{runs}.tula.better"] = float(np.mean([ours < theirs for theirs, ours in pairs]))
            keys = [f"{grid}.{runs}.{name}.{part}" for name in ("pollux", "tula") for part in ("median", "p90")]
            rows.append([grid, runs, *(f"{100 * figures[k]:.1f} %" for k in (*keys, f"{grid}.{runs}.tula.better"))])
    header = ["grids", "runs", "Pollux: median", "p90", "Tula: median", "p90", "better on"]
    print_table("error on what was not profiled, same runs", header, rows)
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
