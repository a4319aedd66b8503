"""Tests the pipeline from predictions to a choice, with offers, eligibility and time to quality."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tula_service.perfmodel.choice import Choice, recommend
from tula_service.perfmodel.memory_model import MemoryObservations, fit_memory, predict_peaks
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.points import ObservationError, StepTimeObservations
from tula_service.perfmodel.pricing import Offer, Spot, Training
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time
from tula_wire.configurations import Configuration, Variant

GRID = [
    Configuration(num_nodes=nodes, ranks_per_node=2, local_batch_size=batch)
    for nodes in (1, 2, 4)
    for batch in (32, 64, 128)
]


def model() -> StepTimeModel:
    times = [0.02 + 0.001 * c.local_batch_size + 0.01 * (c.num_nodes - 1) for c in GRID]
    return fit_step_time(StepTimeObservations.at(GRID, times), candidates=GRID)


def cheapest(steps_factor: Mapping[Configuration, float] | None = None, **options: object) -> Choice:
    offers = {"default": Offer(usd_per_node_hour=10.0)}
    spot = {"default": Offer(usd_per_node_hour=3.0, spot=Spot(0.01))}
    goal = Goal("cost", Training(1e6), offers, spot_offers=spot, steps_factor=steps_factor or {})
    return recommend(GRID, model(), goal, **options)  # type: ignore[arg-type]


def test_on_demand_and_spot_are_separate_estimates_that_compete() -> None:
    found = cheapest()
    assert [e.spot for e in found.estimates] == [False] * len(GRID) + [True] * len(GRID)
    assert len({e.key for e in found.estimates}) == 2 * len(GRID)
    assert found.chosen is not None
    assert found.chosen.spot, "at a third of the price, an interruption every hundred hours is acceptable"


def test_a_candidate_that_failed_or_may_not_fit_has_an_estimate_but_is_not_chosen() -> None:
    first = cheapest().chosen
    assert first is not None
    for name in ("unavailable", "doubtful"):
        found = cheapest(**{name: [first.configuration]})
        assert found.chosen is not None
        assert found.chosen.configuration != first.configuration
        assert first.configuration in {e.configuration for e in found.estimates}
        assert found.ineligible == {first.configuration}


def test_a_doubtful_candidate_is_taken_where_nothing_else_is_left() -> None:
    found = cheapest(unavailable=GRID[1:], doubtful=GRID)
    assert found.chosen is not None
    assert found.chosen.configuration == GRID[0]
    assert found.ineligible == set(GRID[1:])


def test_more_steps_for_the_same_quality_take_longer_and_cost_more() -> None:
    plain, factor = cheapest(), {c: 1.0 + c.global_batch_size / 100 for c in GRID}
    found = cheapest(steps_factor=factor)
    for before, after in zip(plain.estimates, found.estimates, strict=True):
        assert after.time_s.mean == pytest.approx(before.time_s.mean * factor[after.configuration])
        assert after.cost_usd.mean == pytest.approx(before.cost_usd.mean * factor[after.configuration])


def test_estimates_carry_the_peaks_that_the_memory_model_predicts() -> None:
    memory = {Variant(): fit_memory(MemoryObservations(bytes_per_sample=1e7, static_bytes=1e9))}
    found = cheapest(memory=memory)
    assert [e.peak_bytes for e in found.estimates] == predict_peaks(memory, GRID) * 2
    assert predict_peaks(memory, [Configuration(num_nodes=1, local_batch_size=1, instance_type="other")]) == [None]


def test_an_instance_type_without_a_price_is_named() -> None:
    with pytest.raises(ObservationError, match="no price for instance type 'default'"):
        recommend(GRID, model(), Goal("time", Training(1e6), {"large": Offer()}))
