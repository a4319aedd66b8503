"""Tests that designs equal those from a full covariance matrix, and are computed quickly for many candidates."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.configurations import make_configuration
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.planner import greedy_design, plan, prior_covariance
from tula_service.perfmodel.points import Points
from tula_service.perfmodel.pricing import Offer, Training
from tula_service.perfmodel.priors import Priors, generic_prior
from tula_service.perfmodel.step_time_form import log_terms, residual_covariance
from tula_service.perfmodel.step_time_model import StepTimeModel, unmeasured_model
from tula_wire import Configuration
from tula_wire.configurations import Variant

NOISE = generic_prior().scales.noise ** 2


def model_of(candidates: list[Configuration]) -> StepTimeModel:
    return unmeasured_model(Priors(dict.fromkeys((c.instance_type for c in candidates), generic_prior())), candidates)


def matrix(model: StepTimeModel, candidates: list[Configuration]) -> np.ndarray:
    """Return the oracle's covariance of log step time between all candidates; instance types are independent."""
    found = np.zeros((len(candidates), len(candidates)))
    for name in {c.instance_type for c in candidates}:
        at = [row for row, c in enumerate(candidates) if c.instance_type == name]
        points, posterior = Points.of([candidates[row] for row in at]), model.posterior_for(Variant(name))
        member = posterior.leading
        slopes = log_terms(member.theta, points, posterior.reference_batch_size).step_slopes
        residual = residual_covariance(points, points, member.scales) + member.scales.own**2 * np.eye(len(at))
        found[np.ix_(at, at)] = residual + slopes @ member.covariance @ slopes.T
    return found


def conditioned(covariance: np.ndarray, row: int) -> np.ndarray:
    column = covariance[:, row]
    return covariance - np.outer(column, column) / (column[row] + NOISE)


def picked(covariance: np.ndarray, wanted: int, known: list[int], weights: np.ndarray) -> list[int]:
    """Return the oracle's design, in which each run removes as much weighted variance as possible."""
    for row in known:
        covariance = conditioned(covariance, row)
    chosen: list[int] = []
    for _ in range(wanted):
        gain = weights @ covariance**2 / (np.diag(covariance) + NOISE)
        gain[[*known, *chosen]] = 0.0
        chosen.append(int(np.argmax(np.round(gain / gain.max(), 9))))
        covariance = conditioned(covariance, chosen[-1])
    return chosen


@settings(max_examples=30, deadline=None)
@given(
    cells=st.sets(
        st.tuples(
            st.sampled_from([1, 2, 3, 8]),
            st.sampled_from([1, 4]),
            st.sampled_from([8, 24, 32, 256]),
            st.sampled_from([1, 4]),
            st.sampled_from(["a", "b"]),
        ),
        min_size=6,
        max_size=40,
    ),
    seed=st.integers(0, 99),
)
def test_a_design_is_that_of_the_whole_matrix(cells: set[tuple[int, int, int, int, str]], seed: int) -> None:
    candidates = [
        replace(make_configuration(nodes, ranks, batch), grad_accum_steps=steps, instance_type=name)
        for nodes, ranks, batch, steps, name in sorted(cells)
    ]
    model = model_of(candidates)
    weights = np.random.default_rng(seed).uniform(0.01, 1.0, len(candidates))
    whole = matrix(model, candidates)
    points = Points.of(candidates)
    assert prior_covariance(model, points, points) == pytest.approx(whole, rel=1e-9)
    open_rows = [row for row in range(len(candidates)) if row != 1]
    design = greedy_design(model, candidates, 4, allowed=open_rows, used=[1], first=[], weights=weights)
    assert design == picked(whole, 4, [1], weights)


def test_a_design_spends_its_runs_where_variance_matters() -> None:
    candidates = [replace(make_configuration(1, 1, 32), instance_type=name) for name in ("a", "b", "c")]
    weights = np.array([0.1, 1.0, 0.5])
    design = greedy_design(model_of(candidates), candidates, 2, allowed=[0, 1, 2], used=[], first=[], weights=weights)
    assert design == [1, 2]


def test_the_first_plan_of_thousands_of_candidates_needs_little_memory() -> None:
    candidates = [make_configuration(nodes, 4, 8 * batch) for nodes in range(1, 65) for batch in range(1, 65)]
    goal = Goal("time", Training(1e6, 2), {"default": Offer(usd_per_node_hour=12.0)})
    tracemalloc.start()
    try:
        assert len(plan("adaptive", candidates, goal=goal).runs) == 4
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()
