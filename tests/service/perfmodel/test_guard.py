"""Tests which batches preserve accuracy: more epochs allow larger batches, and missing facts only smaller ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.configurations import make_configuration
from tula_service.perfmodel.choice import Choice, choose
from tula_service.perfmodel.guard import CAREFUL, SGD, TURNED, AccuracyGuard
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.pricing import Estimate, Limits, Training

EXAMPLES = st.floats(1e3, 1e9)
BASES = st.sampled_from([8, 32, 64, 256])
NOISE = st.none() | st.floats(1.0, 1e5)
BATCHES = st.integers(0, 12).map(lambda exponent: 8 * 2**exponent)
CONSTANTS = st.sampled_from([TURNED, SGD, CAREFUL])
GUARDS = st.builds(AccuracyGuard, EXAMPLES, BASES, NOISE, CONSTANTS)


@given(GUARDS, BATCHES, st.floats(1.0, 100.0))
def test_more_epochs_never_refuse_what_fewer_allow(guard, batch, times):
    assert guard.allows(batch) <= replace(guard, examples=times * guard.examples).allows(batch)


@given(GUARDS, BATCHES, BATCHES)
def test_a_smaller_batch_than_an_allowed_one_is_allowed(guard, one, other):
    assert guard.allows(max(one, other)) <= guard.allows(min(one, other))


@given(GUARDS, BATCHES, st.floats(1.0, 100.0))
def test_more_noise_never_refuses_what_less_allows(guard, batch, times):
    assume(guard.noise_scale is not None)
    assert guard.allows(batch) <= replace(guard, noise_scale=times * guard.noise_scale).allows(batch)


@given(GUARDS, BATCHES)
def test_an_unknown_optimizer_allows_nothing_that_sgd_does_not_nor_sgd_what_turned_steps_do_not(guard, batch):
    unknown, sgd, turned = (replace(guard, constants=constants).allows(batch) for constants in (CAREFUL, SGD, TURNED))
    assert unknown <= sgd <= turned


@given(GUARDS, BATCHES)
def test_the_base_batch_is_always_allowed_and_nothing_larger_in_a_short_training(guard, batch):
    assert guard.allows(guard.base_batch_size)
    if guard.steps(batch) < guard.constants.least_steps:
        assert guard.allows(batch) == (batch <= guard.base_batch_size)


@given(GUARDS, BATCHES, st.booleans())
def test_the_sentence_says_when_the_accuracy_is_at_risk(guard, batch, refused):
    sentence = guard.sentence(batch, refused_larger=refused, learning_rate_factor=2.5)
    assert ("at risk" in sentence) == (not guard.allows(batch))
    larger_and_kept = guard.allows(batch) and batch > guard.base_batch_size
    assert ("train with `TulaOptimizer`, rate x 2.5." in sentence) <= larger_and_kept
    assert f"{guard.steps(batch):,} step" in sentence


@pytest.mark.parametrize("noise", [None, 1000.0, 8000.0])
@pytest.mark.parametrize("base", [32, 256])
def test_resnet_50_on_imagenet_may_train_at_8192_for_90_epochs(base, noise):
    """In the experiments of Goyal et al. (2017), no accuracy was lost."""
    guard = AccuracyGuard(90 * 1_281_167.0, base, noise, SGD)
    assert guard.allows(8192)
    assert "14,075 steps" in guard.sentence(8192, refused_larger=False)
    assert not replace(guard, examples=5 * 1_281_167.0).allows(8192) or noise == 8000.0


@pytest.mark.parametrize(
    ("examples", "batch", "noise", "allowed"),
    [
        (30 * 6144, 512, 410.0, True),  # 360 steps: vgg lost 2.1 there under the present rule at a noise of 67
        (30 * 6144, 512, 67.0, False),
        (30 * 6144, 1024, 1e6, False),  # 180 steps
        (5 * 1437, 512, None, False),  # the job of the README
        (60 * 6144, 256, None, True),  # 1,440 steps: more than 100 B / b
        (30 * 6144, 256, None, True),
        (30 * 6144, 512, None, False),  # 360 steps, fewer than 100 x 8
    ],
)
def test_the_cells_of_the_study(examples, batch, noise, allowed):
    assert AccuracyGuard(examples, 64, noise, SGD).allows(batch) is allowed


@pytest.mark.parametrize(
    ("examples", "batch", "noise", "allowed"),
    [
        (30 * 6144, 512, 67.0, True),  # vgg of 30 epochs gained 0.4 there with turned steps
        (60 * 6144, 1024, 67.0, False),  # 360 steps, but vgg lost 2.4
        (30 * 6144, 1024, 1e6, False),  # 180 steps
        (30 * 6144, 512, None, True),  # 360 steps: more than 40 x 8
        (30 * 2048, 256, 200.0, False),  # resnet20: 240 steps lost 1.3
    ],
)
def test_the_cells_of_the_study_with_turned_steps(examples, batch, noise, allowed):
    assert AccuracyGuard(examples, 64, noise, TURNED).allows(batch) is allowed


def test_the_line_of_quality_names_steps_noise_and_the_rate():
    guard = AccuracyGuard(30 * 6144, 64, 67.0, TURNED)
    assert guard.sentence(512, refused_larger=False, learning_rate_factor=4.1) == (
        "360 steps (a batch of 64 would take 2,880); 0.88 times what the gradient noise supports (585); most such "
        "training runs lost at most 1 point in our experiments; train with `TulaOptimizer`, rate x 4.1."
    )
    assert guard.sentence(512, refused_larger=False).endswith("; train with `TulaOptimizer`.")
    alone = guard.sentence(512, refused_larger=False, learning_rate_factor=4.1, divided=False)
    assert "train with" not in alone
    assert alone.endswith(
        "keep the learning rate, or take two micro-steps, without which `TulaOptimizer` cannot scale it."
    )


def chosen(objective, guard, limits=None) -> Choice:
    """Return the choice if one node scales perfectly with the batch, so that a larger batch is always better."""

    def candidate(batch: int) -> Estimate:
        time = Interval(*(3600.0 * 32 / batch,) * 3)
        return Estimate(make_configuration(1, 1, batch), Interval(1, 1, 1), time, time, time, None)

    goal = Goal(objective, Training(1000), {}, limits or Limits(), guard=guard)
    return choose(goal, [candidate(batch) for batch in (32, 64, 128, 256, 512)])


def batch_of(choice: Choice) -> int:
    assert choice.chosen is not None
    return choice.chosen.configuration.global_batch_size


def test_balanced_takes_the_largest_batch_that_keeps_the_accuracy():
    assert batch_of(chosen("balanced", None)) == 512
    assert batch_of(chosen("balanced", AccuracyGuard(300 * 128, 32, 1e4, SGD))) == 128
    choice = chosen("balanced", AccuracyGuard(300 * 128, 32, 1e4, SGD))
    assert "only batches that keep the accuracy" in choice.merit


def test_balanced_takes_the_base_batch_where_nothing_passes_and_more_epochs_allow_more():
    short = AccuracyGuard(100 * 32, 32, None, SGD)
    assert batch_of(chosen("balanced", short)) == 32
    assert "more epochs would allow a larger batch" in short.sentence(32, refused_larger=True)
    assert batch_of(chosen("balanced", replace(short, examples=1000 * short.examples))) == 512


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_time_and_cost_stay_as_they_are(objective):
    assert batch_of(chosen(objective, AccuracyGuard(100 * 32, 32, None, SGD))) == 512


def test_a_largest_batch_that_the_user_sets_is_believed():
    guard = AccuracyGuard(100 * 32, 32, None, SGD)
    assert batch_of(chosen("balanced", guard, Limits(max_global_batch_size=256))) == 256


def test_no_contender_is_looked_for_among_refused_batches():
    choice = chosen("balanced", AccuracyGuard(100 * 32, 32, None, SGD))
    barred = {configuration.global_batch_size for configuration, _ in choice.barred}
    assert barred == {64, 128, 256, 512}


@pytest.mark.parametrize(
    ("batch_normalization", "base", "local"), [(False, 8, 64), (True, 32, 64), (True, 16, 32), (True, 8, 32)]
)
def test_of_nearly_equal_choices_batch_normalization_gets_at_most_twice_the_base_batch(
    batch_normalization, base, local
):
    """2 nodes with 64 examples take a little longer and cost a little less than 4 nodes with 32."""

    def candidate(nodes: int, batch: int, seconds: float, usd: float) -> Estimate:
        time, cost = Interval(seconds, seconds, seconds), Interval(usd, usd, usd)
        return Estimate(make_configuration(nodes, 1, batch), Interval(1, 1, 1), time, cost, time, None)

    goal = Goal("balanced", Training(1e6), {}, guard=AccuracyGuard(1e9, base), batch_normalization=batch_normalization)
    choice = choose(goal, [candidate(2, 64, 100.0, 98.0), candidate(4, 32, 98.0, 103.0), candidate(4, 64, 97.0, 104.0)])
    assert choice.chosen is not None
    assert choice.chosen.configuration.local_batch_size == local
    assert ("batch normalization" in choice.merit) is (local == 32)
