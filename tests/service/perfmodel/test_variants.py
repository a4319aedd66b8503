"""Tests that predictions for an unmeasured variant start from the nearest measured variant.

A variant is an instance type with a value of each option; the base has each option's first value. Predictions are
corrected by the effects of the options in which the two variants differ.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.support.configurations import make_configuration
from tula_service.perfmodel.choice import recommend
from tula_service.perfmodel.map_fit import build_targets, fit_posterior
from tula_service.perfmodel.memory_model import MemoryObservations, fit_memory, switched
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.planner import PlanBudget, plan
from tula_service.perfmodel.points import ObservationError, Points, StepTimeObservations
from tula_service.perfmodel.pricing import Offer, Training
from tula_service.perfmodel.priors import Priors
from tula_service.perfmodel.step_time_form import AT, NUM_PARAMETERS
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time, unmeasured_model
from tula_service.perfmodel.variants import (
    Switch,
    believed_effect,
    find_launch,
    further_switches,
    nearest,
    start_of_variant,
)
from tula_wire import Configuration
from tula_wire.configurations import Variant
from tula_wire.options import Options, combinations

SWITCHES = {"compile": ["off", "on"], "precision": ["fp32", "bf16"]}
BASE, COMPILED, HALF, BOTH = (
    (("compile", compiled), ("precision", precision))
    for compiled, precision in (("off", "fp32"), ("on", "fp32"), ("off", "bf16"), ("on", "bf16"))
)
FACTORS = {"on": 0.8, "bf16": 0.5}


def at(nodes: int, batch: int, options: Options, instance_type: str = "default") -> Configuration:
    return replace(make_configuration(nodes, 1, batch, instance_type=instance_type), options=options)


def seconds(c: Configuration) -> float:
    """Return the step time of a job whose options speed up compute but not communication."""
    factor = math.prod(FACTORS.get(word, 1.0) for _, word in c.options)
    return factor * (0.01 + 0.001 * c.local_batch_size) + 0.02 * (c.num_nodes > 1)


def fitted(ran: list[Configuration], input_s: list[float] | None = None) -> StepTimeModel:
    observed = StepTimeObservations.at(ran, [seconds(c) for c in ran], input_time_s=input_s)
    candidates = [at(n, b, o) for n in (1, 2, 4) for b in (32, 64, 128, 256) for o in combinations(SWITCHES)]
    return fit_step_time(observed, prior=Priors(base=BASE), candidates=candidates)


def launched(*options: Options) -> list[Configuration]:
    return [at(n, b, o) for o in options for n in (1, 4) for b in (32, 64, 256)]


def test_the_nearest_variant_is_of_the_same_type_then_with_the_fewest_switches() -> None:
    measured = [Variant("a", BASE), Variant("b", HALF), Variant("a", COMPILED)]
    assert nearest(Variant("a", BOTH), measured) == Variant("a", COMPILED)
    assert nearest(Variant("a", HALF), measured) == Variant("a", BASE), "the first of equally near variants"
    assert nearest(Variant("b", BASE), measured) == Variant("b", HALF)
    assert nearest(Variant("c", HALF), measured) == Variant("b", HALF)
    assert nearest(Variant("a"), []) is None


def test_the_first_switch_from_the_base_interacts_with_nothing() -> None:
    assert further_switches(BASE, BASE, HALF) == 0
    assert further_switches(BASE, BASE, BOTH) == 1
    assert further_switches(HALF, BASE, BOTH) == 1


@pytest.mark.parametrize(
    ("name", "before", "after", "factor"),
    [
        ("precision", "fp32", "bf16", 0.6),
        ("precision", "16-mixed", "32-true", 1 / 0.6),
        ("compile", "off", "max-autotune", 0.85),
        ("checkpointing", "on", "off", 0.75),
        ("num_workers", "4", "8", 1.0),
        ("precision", "fp8", "fp4", 1.0),
        ("attention", "eager", "flash", 1.0),
    ],
)
def test_what_is_believed_of_a_switch_follows_from_its_name_and_direction(
    name: str, before: str, after: str, factor: float
) -> None:
    assert math.exp(believed_effect(Switch(name, before, after)).compute) == pytest.approx(factor)


def test_an_unlaunched_value_is_predicted_as_believed_and_unsurely() -> None:
    model = fitted(launched(BASE))
    points = [at(1, 256, BASE), at(1, 256, HALF), at(1, 256, COMPILED)]
    base, half, compiled = model.predict(points).intervals()
    assert half.mean / base.mean == pytest.approx(0.6, rel=0.05)
    assert compiled.mean / base.mean == pytest.approx(0.85, rel=0.05)
    assert half.log_sd > compiled.log_sd > base.log_sd
    assert half.low < seconds(points[1]) < half.high


def test_a_combination_adds_the_logarithms_of_its_launched_singles_with_an_interaction() -> None:
    model = fitted(launched(BASE, HALF, COMPILED))
    (both,) = model.predict([at(1, 256, BOTH)]).intervals()
    assert both.mean == pytest.approx(seconds(at(1, 256, BOTH)), rel=0.05)
    assert 0.2 < both.log_sd < 0.45
    assert both.low < seconds(at(1, 256, BOTH)) < both.high


def test_each_variant_is_fitted_to_its_own_runs() -> None:
    ran = launched(BASE, HALF)
    model = fitted(ran)
    assert np.allclose(model.predict(ran).mean_s, [seconds(c) for c in ran], rtol=0.05)
    left = [at(2, 128, BASE), at(2, 128, HALF)]
    assert np.allclose(model.predict(left).mean_s, [seconds(c) for c in left], rtol=0.25)
    assert not model.predict([at(1, 64, COMPILED)]).measured[0]
    assert model.predict([at(1, 64, COMPILED)]).extrapolated[0]


def test_half_of_a_slow_cluster_of_the_base_is_expected_of_the_variants_that_start_from_it() -> None:
    """The links between two nodes are congested, so two-node steps take 1.3 times as long, whatever the precision."""
    ran = [*launched(BASE), *(at(2, b, BASE) for b in (32, 64, 256)), *launched(HALF)]
    congested = [seconds(c) * (1.3 if c.num_nodes == 2 else 1.0) for c in ran]
    model = fit_step_time(StepTimeObservations.at(ran, congested), prior=Priors(base=BASE), candidates=ran)
    base, half, both, elsewhere = (
        model.posterior_for(Variant(*variant)).residual(Points.of([at(2, 64, variant[1])]))[0]
        for variant in (("default", BASE), ("default", HALF), ("default", BOTH), ("other", BASE))
    )
    assert base > 0.05
    assert half == pytest.approx(base / 2, rel=0.5), "and its own, which is small"
    assert both == pytest.approx(half / 2), "it starts from the nearest measured variant, which starts from the base"
    assert elsewhere == 0.0, "other machines have other links"


def test_a_variant_starts_from_what_the_runs_of_the_base_say_of_parameters_jointly() -> None:
    """Three batches of the base show how parameters are related, so one batch of a variant predicts another better."""
    measured = fitted([at(1, batch, BASE) for batch in (32, 64, 256)]).posteriors
    joint, base = start_of_variant(Variant("default", HALF), measured, Priors(base=BASE))
    assert joint is not None
    assert joint.covariance is not None
    assert base is measured[Variant("default", BASE)]
    ran, unknown = [at(1, 64, HALF)], Points.of([at(1, 256, HALF)])
    targets = build_targets(StepTimeObservations.at(ran, [seconds(c) for c in ran]), np.ones(1), joint.scales)
    variances = [
        fit_posterior(targets, prior.without_accumulation(), 256.0, base).predict(unknown)[1][0]
        for prior in (joint, replace(joint, covariance=None))
    ]
    assert variances[0] < 0.9 * variances[1]


def test_a_prior_whose_covariance_contradicts_its_deviations_is_refused() -> None:
    joint = fitted(launched(BASE)).posteriors[Variant("default", BASE)].as_prior()
    with pytest.raises(ObservationError, match="diagonal of the prior covariance"):
        replace(joint, sd=2.0 * joint.sd)
    without = joint.without_accumulation()
    assert without.covariance is not None
    assert not without.covariance[AT.once, : AT.once].any(), "an absent part is independent of all others"
    wider = without.widened(np.ones(NUM_PARAMETERS))
    assert np.allclose(wider.sd**2, without.sd**2 + 1.0)
    assert wider.precision[AT.floor, AT.floor] < without.precision[AT.floor, AT.floor]


def test_loader_workers_act_on_the_waits_alone() -> None:
    few, many = ((("num_workers", word),) for word in ("4", "16"))
    ran = [at(1, batch, few) for batch in (32, 64, 256)]
    steps_s = [0.01 + 0.003 * c.local_batch_size for c in ran]
    waits_s = [0.002 * c.local_batch_size for c in ran]
    observed = StepTimeObservations.at(ran, steps_s, input_time_s=waits_s)
    model = fit_step_time(observed, prior=Priors(base=few), candidates=ran)
    now, more = (model.predict([at(1, 128, options)]) for options in (few, many))
    assert now.mean_s[0] - now.input_s[0] == pytest.approx(more.mean_s[0] - more.input_s[0], rel=0.01)
    assert more.input_s[0] == pytest.approx(now.input_s[0] / 4, rel=0.05)
    assert more.low_s[0] < now.mean_s[0] - now.input_s[0] * 0.8, "the loader may also take as long as before"


def test_a_plan_launches_the_base_twice_and_then_what_promises_most() -> None:
    candidates = [at(n, b, o) for n in (1, 4) for b in (32, 64, 128, 256) for o in combinations(SWITCHES)]
    goal = Goal("time", Training(1e6), {"default": Offer(usd_per_rank_hour=1.0)})
    budget = PlanBudget(max_runs=8, share_launches=True)
    prior = Priors(base=BASE)
    first = plan("adaptive", candidates, unmeasured_model(prior, candidates), goal=goal, budget=budget)
    ran = [run.configuration for run in first.runs]
    assert {find_launch(c).options for c in ran} == {BASE}
    assert {c.num_nodes for c in ran} == {1, 4}
    chosen = None
    for _ in range(6):
        observed = StepTimeObservations.at(ran, [seconds(c) for c in ran])
        model = fit_step_time(observed, prior=prior, candidates=candidates)
        chosen = recommend(candidates, model, goal).chosen
        assert chosen is not None
        shown = {find_launch(c) for c in ran}
        assert chosen.configuration.options == BASE or find_launch(chosen.configuration) in shown
        following = plan("adaptive", candidates, model, goal=goal, budget=budget)
        if not following.runs:
            break
        ran += [run.configuration for run in following.runs]
    assert chosen is not None
    assert chosen.configuration.options == BOTH
    assert seconds(chosen.configuration) / chosen.configuration.global_batch_size == pytest.approx(
        min(seconds(c) / c.global_batch_size for c in candidates)
    )


def test_an_unread_variant_keeps_the_static_bytes_and_scales_what_an_example_needs() -> None:
    base = fit_memory(MemoryObservations([16.0, 64.0], [1e9 + 16e7, 1e9 + 64e7], static_bytes=1e9))
    less = switched(base, (("checkpointing", "off"),), (("checkpointing", "on"),))
    assert less.predict(100.0).mean == pytest.approx(1e9 + 0.4 * 1e9, rel=0.05)
    assert less.predict(100.0).log_sd > base.predict(100.0).log_sd
    assert less.max_local_batch_size(8e9, safety_probability=0.5) > base.max_local_batch_size(8e9)
