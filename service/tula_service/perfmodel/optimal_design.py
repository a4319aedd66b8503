"""The most informative configurations to measure: greedy reduction of the model's own variance."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tula_service.perfmodel.map_fit import Posterior
from tula_service.perfmodel.points import FloatArray, Points
from tula_service.perfmodel.residual_gp import batch_correlation, cluster_correlation
from tula_service.perfmodel.step_time_form import jacobian
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire.configurations import Configuration

IntArray = npt.NDArray[np.intp]


@dataclass
class Uncertainty:
    """Covariance of log step time over the m candidates of one instance type, by its parts.

    Of candidates i and j it is the sum of L[batch i, batch j] R[cluster i, cluster j] over `pairs` (L, R), plus
    `factors[i] @ (signs * factors[j])`, plus `own` where i is j. `rows` are positions in the list of all candidates,
    `batch` and `cluster` positions in the tables L and R; `factors` has shape (m, k). So thousands of candidates cost
    products of small tables, and no array of shape (m, m) is made.
    """

    rows: IntArray
    batch: IntArray
    cluster: IntArray
    pairs: Sequence[tuple[FloatArray, FloatArray]]
    factors: FloatArray
    signs: FloatArray
    own: float = 0.0

    @classmethod
    def of(cls, rows: IntArray, points: Points, posterior: Posterior) -> Uncertainty:
        """What a posterior without measurements leaves open at these points: its parameters and the residual."""
        member, scales = posterior.leading, posterior.leading.scales
        _, slopes, _ = jacobian(member.theta, points, posterior.reference_batch_size)
        variances, directions = np.linalg.eigh(member.covariance)
        _, one_of_each, batch = np.unique(points.local_batch_size, return_index=True, return_inverse=True)
        batches = points.take(one_of_each)
        clusters = np.stack([points.world_size, points.num_nodes])
        _, one_of_each, cluster = np.unique(clusters, axis=1, return_index=True, return_inverse=True)
        by_batch = batch_correlation(batches, batches, scales)
        by_cluster = cluster_correlation(points.take(one_of_each), points.take(one_of_each), scales)
        pairs = (
            (scales.batch**2 * by_batch, np.ones_like(by_cluster)),
            (np.ones_like(by_batch), scales.cluster**2 * by_cluster),
            (scales.both**2 * by_batch, by_cluster),
        )
        factors = slopes @ (directions * np.sqrt(np.maximum(variances, 0.0)))
        return cls(rows, batch.ravel(), cluster.ravel(), pairs, factors, np.ones(variances.size), scales.own**2)

    def gains(self, weights: FloatArray, noise_variance: float) -> FloatArray:
        """The weighted variance that measuring each candidate with this noise would remove, shape (m,)."""
        signed = self.factors * self.signs
        variance = self._variance() + self.own
        squares = itertools.product(self.pairs, self.pairs)
        removed = self._through([(a * c, b * d) for (a, b), (c, d) in squares], weights[None, :])[0]
        mixed = self._through(self.pairs, (weights[:, None] * self.factors).T)
        removed += 2.0 * np.einsum("mk,km->m", signed, mixed)
        removed += np.einsum("mk,kl,ml->m", signed, (self.factors.T * weights) @ self.factors, signed)
        removed += self.own * weights * (2.0 * variance - self.own)
        return np.asarray(removed / (variance + noise_variance))

    def measure(self, at: int, noise_variance: float) -> None:
        """What is left once candidate `at` of the m is measured with this noise."""
        column = self.factors @ (self.signs * self.factors[at])
        for left, right in self.pairs:
            column += left[self.batch, self.batch[at]] * right[self.cluster, self.cluster[at]]
        column[at] += self.own
        self.factors = np.column_stack([self.factors, column / np.sqrt(column[at] + noise_variance)])
        self.signs = np.append(self.signs, -1.0)

    def _variance(self) -> FloatArray:
        """The diagonal without `own`."""
        shared = sum(np.diag(left)[self.batch] * np.diag(right)[self.cluster] for left, right in self.pairs)
        return np.asarray(shared + self.factors**2 @ self.signs)

    def _through(self, pairs: Sequence[tuple[FloatArray, FloatArray]], values: FloatArray) -> FloatArray:
        """Sums over candidates i of values[:, i] L[batch i, batch j] R[cluster i, cluster j], shape (k, m)."""
        shape = len(pairs[0][0]), len(pairs[0][1])
        cells = np.ravel_multi_index((self.batch, self.cluster), shape)
        sums = np.array([np.bincount(cells, each, shape[0] * shape[1]) for each in values])
        table = sums.reshape(len(values), *shape)
        total = sum(left @ table @ right for left, right in pairs)
        return np.asarray(total)[:, self.batch, self.cluster]


def uncertainty(model: StepTimeModel, candidates: Sequence[Configuration]) -> list[Uncertainty]:
    """What a model without measurements leaves open, by instance type; types count as independent."""
    points = Points.of(candidates)
    types = np.array(points.instance_type, dtype=object)
    at = {name: np.flatnonzero(types == name) for name in sorted(set(points.instance_type))}
    return [Uncertainty.of(rows, points.take(rows), model.posterior_for(name)) for name, rows in at.items()]


def greedy_design(
    parts: Sequence[Uncertainty],
    noise_variance: float,
    wanted: int,
    *,
    allowed: Iterable[int],
    known: Iterable[int] = (),
    first: Iterable[Sequence[int]] = (),
    weights: FloatArray | None = None,
) -> list[int]:
    """Row numbers of up to `wanted` runs, in order, that leave the least summed variance; deterministic.

    Each pick minimises the posterior variance summed over all rows, as if it were measured with this noise: no step
    time is needed, so the runs may go in parallel. `known` rows will be measured anyway; one row of each group in
    `first` comes before all others (the largest cluster of each instance type). `weights`, one a row, say how much the
    variance of each matters; all the same without. `parts` are updated.
    """
    places = {int(row): (part, at) for part in parts for at, row in enumerate(part.rows)}
    matters = np.ones(len(places)) if weights is None else weights
    for row in known:
        places[row][0].measure(places[row][1], noise_variance)
    gains = np.zeros(len(places))
    for part in parts:
        gains[part.rows] = part.gains(matters[part.rows], noise_variance)
    open_rows = sorted(set(allowed))
    opening = [group for group in (sorted(set(rows) & set(open_rows)) for rows in first) if group]
    chosen: list[int] = []
    while len(chosen) < wanted and open_rows:
        pool = np.array(opening.pop(0) if opening else open_rows)
        gain = gains[pool]
        row = int(pool[int(np.argmax(np.round(gain / max(float(gain.max()), 1e-300), 9)))])
        chosen.append(row)
        open_rows.remove(row)
        part, at = places[row]
        part.measure(at, noise_variance)
        gains[part.rows] = part.gains(matters[part.rows], noise_variance)
    return chosen


def corner_design(candidates: Sequence[Configuration], *, two: bool = False) -> list[int]:
    """Smallest and largest batch on the largest and the smallest cluster of each type.

    `two`: as the paper has it (IV-B), the largest batch on the largest and the smallest on the smallest cluster.
    """
    rows: list[int] = []
    for name in sorted({c.instance_type for c in candidates}):
        of_type = [row for row, c in enumerate(candidates) if c.instance_type == name]
        sizes = [candidates[row].world_size for row in of_type]
        for size in dict.fromkeys((max(sizes), min(sizes))):
            cluster = [row for row in of_type if candidates[row].world_size == size]
            ordered = sorted(cluster, key=lambda row: (candidates[row].local_batch_size, candidates[row]))
            ends = (ordered[-1], ordered[0])
            rows.extend(dict.fromkeys(ends if not two else ends[:1] if size == max(sizes) else ends[1:]))
    return rows
