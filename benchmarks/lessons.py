"""Measures how much earlier jobs of other networks on a cluster improve predictions for a job profiled on one GPU.

    python -m benchmarks.lessons [--grids FILE] [--json OUT] [--smoke]

FILE contains grids of step times with the columns of tests/data/grids/step_time.csv and optionally `parameters`, the
network's number of parameters. On every cluster with at least three networks, each network is held out in turn: it has
been profiled on one GPU, and each other network is an earlier job that was fitted to its whole grid. `lessons` predicts
the held-out network's configurations on eight or more GPUs from that network's rows and the earlier jobs, and `without`
predicts them from that network's rows and the generic prior. The figures over all these configurations are the
`median_error` and `p90_error` of |predicted / measured - 1|, and the `coverage` of the 90 % intervals. `--smoke` uses
only networks that were measured on two or more GPUs, since the repository's grids contain no others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.support.grids import STEP_TIME_TABLE, Placement, Workload, grids_parser, read_rows, read_step_time
from benchmarks.support.report import mean, median, percentile, print_table, write_json
from tula_service.perfmodel.priors import Priors, StepTimePrior, generic_prior, prior_from_jobs
from tula_service.perfmodel.step_time_model import fit_step_time

FEWEST_NETWORKS = 3
LARGE = 8  # smallest number of ranks at which predictions are scored
_OWN_SCALE_SD = 1.0
PARAMETERS = {
    "BERT": 110e6, "DeepSpeech2": 38e6, "InceptionV3": 23.8e6, "NeuMF": 1.6e6, "ResNet-18": 11.2e6,
    "ResNet-50": 25.6e6, "YOLOv3": 61.9e6,
}  # fmt: skip
"""The networks' published parameter counts; only the ratios within a cluster matter."""


@dataclass(frozen=True)
class Job:
    """A network's largest grid on a cluster, and the network's number of parameters (None: unknown)."""

    workload: Workload
    cluster: str
    network: str
    parameters: float | None

    def small(self, ranks: int) -> list[Placement]:
        """Return the configurations with at most `ranks` ranks, which the job has profiled."""
        return [c for c in self.workload.candidates if c.world_size <= ranks]

    def learned(self) -> StepTimePrior:
        """Return the lesson that later jobs can use."""
        candidates = self.workload.candidates
        model = fit_step_time(self.workload.measure(candidates), candidates=candidates)
        return model.posterior_for(candidates[0].variant).without_prior()


@dataclass(frozen=True)
class Score:
    """The errors of predictions for one job's large configurations, with flags for intervals that contain the truth."""

    errors: Sequence[float]
    inside: Sequence[float]


def read(path: Path, ranks: int) -> dict[str, list[Job]]:
    """Return the jobs of each cluster with enough networks.

    Each job has the network's largest grid on the cluster. Grids without configurations on at most `ranks` ranks are
    left out.
    """
    about = {row["workload"]: row for row in read_rows(path)}
    best: dict[tuple[str, str], Job] = {}
    for workload in read_step_time(path):
        row = about[workload.name]
        # BERT in two frameworks counts as one network, although one framework says little about the other.
        network = next((name for name in PARAMETERS if row["model"].startswith(name)), row["model"])
        counted = float(row.get("parameters") or 0.0) or PARAMETERS.get(network)
        job = Job(workload, row["cluster"], network, counted)
        key = (job.cluster, job.network)
        if job.small(ranks) and (key not in best or _size(job) > _size(best[key])):
            best[key] = job
    clusters: dict[str, list[Job]] = defaultdict(list)
    for job in best.values():
        clusters[job.cluster].append(job)
    return {name: jobs for name, jobs in clusters.items() if len(jobs) >= FEWEST_NETWORKS}


def score(job: Job, others: Sequence[Job], ranks: int, learned: Mapping[str, StepTimePrior]) -> Iterator[Score]:
    """Yield scores of predictions for large configurations, first with the lessons of `others`, then without them."""
    few, candidates = job.small(ranks), job.workload.candidates
    large = [c for c in candidates if c.world_size >= LARGE]
    truth = np.array([job.workload.step_time_s[c] for c in large])
    ratios = [job.parameters / other.parameters if job.parameters and other.parameters else None for other in others]
    prior = prior_from_jobs(
        [learned[other.workload.name] for other in others], scale=_scale(job), gradient_ratios=ratios
    )
    for believed in (Priors(dict.fromkeys((c.instance_type for c in candidates), prior)), Priors()):
        predicted = fit_step_time(job.workload.measure(few), prior=believed, candidates=candidates).predict(large)
        inside = (predicted.low_s <= truth) & (truth <= predicted.high_s)
        yield Score(np.abs(predicted.mean_s / truth - 1.0).tolist(), inside.astype(float).tolist())


def _scale(job: Job) -> StepTimePrior:
    """Return a prior whose compute time is centred on the step time of the largest batch on the fewest ranks."""
    base = generic_prior()
    where = max(job.workload.candidates, key=lambda c: (-c.world_size, c.local_batch_size))
    centre, sd = base.mean.copy(), base.sd.copy()
    centre[0], sd[0] = np.log(job.workload.step_time_s[where]), _OWN_SCALE_SD
    return replace(base, mean=centre, sd=sd, absolute=True, reference_batch_size=float(where.local_batch_size))


def _size(job: Job) -> int:
    return len(job.workload.candidates)


def main() -> None:
    """Score every job of every cluster, and print and write the figures."""
    parser = grids_parser("lessons", __doc__, STEP_TIME_TABLE)
    options = parser.parse_args()
    ranks = 2 if options.smoke else 1
    clusters = read(options.grids, ranks)
    if not clusters:
        parser.error(f"--grids {options.grids}: no cluster has {FEWEST_NETWORKS} or more networks measured on one GPU.")
    rows, total = [], {"lessons": Score([], []), "without": Score([], [])}
    for name, jobs in sorted(clusters.items()):
        learned = {job.workload.name: job.learned() for job in jobs}
        scores_by_kind: dict[str, list[Score]] = defaultdict(list)
        for job in jobs:
            others = [other for other in jobs if other is not job]
            for kind, job_score in zip(total, score(job, others, ranks, learned), strict=True):
                scores_by_kind[kind].append(job_score)
        for kind, scores in scores_by_kind.items():
            on_cluster = Score(
                [e for job_score in scores for e in job_score.errors],
                [i for job_score in scores for i in job_score.inside],
            )
            total[kind] = Score([*total[kind].errors, *on_cluster.errors], [*total[kind].inside, *on_cluster.inside])
            rows.append([name, str(len(jobs)), kind, *_cells(on_cluster)])
    rows += [["all", "", kind, *_cells(all_)] for kind, all_ in total.items()]
    print_table("many GPUs predicted from one", ["cluster", "networks", "", "median", "p90", "coverage"], rows)
    figures = {}
    for kind, all_ in total.items():
        figures[f"{kind}.median_error"] = median(all_.errors)
        figures[f"{kind}.p90_error"] = percentile(all_.errors, 0.9)
        figures[f"{kind}.coverage"] = mean(all_.inside)
    write_json(options.json, figures)


def _cells(scored: Score) -> list[str]:
    figures = median(scored.errors), percentile(scored.errors, 0.9), mean(scored.inside)
    return [f"{100.0 * figure:.1f} %" for figure in figures]


if __name__ == "__main__":
    main()
