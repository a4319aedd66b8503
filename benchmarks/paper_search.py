"""The paper's two searches with its equation 2, replayed on measured grids: figure 11b in this project's terms.

    python -m benchmarks.paper_search [--grids FILE] [--json OUT] [--jobs N] [--only SOURCE] [--without SOURCE]
                                      [--smoke]

`two_points`: `search = "paper"` profiles the smallest batch on the smallest cluster and the largest on the largest, and
every other configuration is predicted. `full`: every configuration is predicted from all others. Keys are
`paper.GRID.SEARCH.FORM.median` and `.p90` over workloads of each one's median relative error (0.04 = 4 %), for the
forms `ring` and `parameter_server`; two points also for `overlap`, this project's default form.

`paper.speed_up.batch.median`: how many times faster an epoch is at the best batch of the largest cluster than at the
smallest batch there, median over workloads; `.smallest.median`: at the best configuration than at the smallest batch of
the smallest cluster. Both are distances between two rows of a table, as in section VII of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, get_args

import numpy as np

from benchmarks.step_time import corners, held_out
from benchmarks.support.grids import Placement, Workload, over_workloads, workloads_parser
from benchmarks.support.report import median, percentile, print_table, write_json
from tula_service.perfmodel.paper_form import fit_paper_form
from tula_service.perfmodel.points import Points
from tula_wire.enums import StepTimeForm

PAPER: Final[tuple[StepTimeForm, ...]] = ("ring", "parameter_server")


def replay(workload: Workload) -> dict[str, float]:
    """The median error of each search and form on one workload."""
    found = {}
    runs = corners(workload, two=True)
    for form in get_args(StepTimeForm):
        found[f"two_points.{form}"] = median(held_out(workload, runs, form)[0])
    for form in PAPER:
        found[f"full.{form}"] = median([_left_out(workload, one, form) for one in workload.candidates])
    return found


def _left_out(workload: Workload, one: Placement, form: StepTimeForm) -> float:
    """The relative error of one configuration as predicted from all others."""
    fit = fit_paper_form(workload.measure([c for c in workload.candidates if c != one]), form)
    if fit is None:
        return math.nan
    return abs(float(np.exp(fit.predict_step(Points.of([one])).mean[0])) / workload.step_time_s[one] - 1.0)


def speed_ups(workload: Workload) -> dict[str, float]:
    """Time of an epoch at a small configuration over the best: on the largest cluster, and of the whole table."""
    epoch = {c: step_s / c.global_batch_size for c, step_s in workload.step_time_s.items()}
    found = {}
    for key, size in (("batch", max(c.world_size for c in epoch)), ("smallest", min(c.world_size for c in epoch))):
        batches = {c.global_batch_size: epoch[c] for c in epoch if c.world_size == size}
        found[key] = batches[min(batches)] / min((batches if key == "batch" else epoch).values())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; answers the exit status."""
    parser = workloads_parser("paper_search", __doc__)
    options, pairs = over_workloads(parser, replay, arguments)
    figures: dict[str, float] = {}
    rows = []
    for grid in ("regular", "hard"):
        chosen = [found for workload, found in pairs if workload.grid == grid]
        figures[f"paper.{grid}.workloads"] = float(len(chosen))
        for name in chosen[0] if chosen else ():
            errors = [found[name] for found in chosen if found[name] == found[name]]
            prefix = f"paper.{grid}.{name}"
            figures[f"{prefix}.median"], figures[f"{prefix}.p90"] = median(errors), percentile(errors, 0.9)
            rows.append(
                [
                    f"{grid} ({len(chosen)})",
                    *name.split("."),
                    *(f"{100 * figures[f'{prefix}.{part}']:.1f} %" for part in ("median", "p90")),
                ]
            )
    faster = [speed_ups(workload) for workload, _ in pairs]
    for key in ("batch", "smallest"):
        figures[f"paper.speed_up.{key}.median"] = median([each[key] for each in faster])
        print(f"paper.speed_up.{key}.median: {figures[f'paper.speed_up.{key}.median']:.1f}")
    print_table("error of what was not profiled", ["grids", "search", "form", "median", "p90"], rows)
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
