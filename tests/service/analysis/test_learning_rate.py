"""Tests that the learning-rate rule depends on the optimizer, batch normalization and the ratio to the base batch."""

from __future__ import annotations

from typing import Any

import pytest

from tula_service.analysis.scaling import LearningRate
from tula_wire import ModelSpec


@pytest.mark.parametrize(
    ("facts", "times", "rule", "said"),
    [
        ({}, 1.0, None, ""),
        (
            {},
            4.0,
            "gain",
            "scale. `TulaOptimizer` increases the rate step by step; without it, use a warm-up.",
        ),
        (
            {"batch_normalization": True},
            8.0,
            "gain",
            "a batch of 64 by 3.2, which follows from the gradient noise scale",
        ),
        ({"batch_normalization": True}, 32.0, "gain", "at most 16 times the base batch; also try LARS."),
        ({"batch_normalization": False}, 32.0, "gain", "at most 16 times the base batch."),
        ({"optimizer": "adam"}, 16.0, "gain", "a batch of 64 by 1.8, which follows from the gradient noise scale"),
        ({"optimizer": "other"}, 4.0, None, "a batch of 64 by 3.2, which follows from the gradient noise scale"),
    ],
)
def test_the_rule_and_its_sentence(facts: dict[str, Any], times: float, rule: str | None, said: str) -> None:
    model = ModelSpec.model_validate({"name": "net", **facts})
    rate = LearningRate(model, 64, times, 3.2)
    assert rate.rule == rule
    assert said in rate.advice
    assert bool(rate.advice) == (times > 1.0)


def test_without_a_noise_scale_the_range_is_said() -> None:
    assert "64 by 1 to 4, depending" in LearningRate(ModelSpec(name="net"), 64, 4.0, None).advice


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "other"])
@pytest.mark.parametrize("normalization", [True, False, None])
@pytest.mark.parametrize("times", [1.0, 4.0, 64.0])
@pytest.mark.parametrize("by_noise_scale", [None, 3.2])
def test_the_factor_is_the_number_of_the_sentence_and_of_the_rule(
    optimizer: str, normalization: bool | None, times: float, by_noise_scale: float | None
) -> None:
    model = ModelSpec.model_validate({"name": "net", "optimizer": optimizer, "batch_normalization": normalization})
    rate = LearningRate(model, 64, times, by_noise_scale)
    rule, said, factor = rate.rule, rate.advice, rate.factor
    root = optimizer == "adam"
    if times == 1.0:
        assert (rule, factor, said) == (None, 1.0, "")
    elif factor is None:
        assert by_noise_scale is None
        assert f"64 by 1 to {times**0.5 if root else times:.3g}, depending on" in said
    else:
        assert factor == pytest.approx(3.2**0.5 if root else 3.2)
        assert f"64 by {factor:.2g}, which follows from the gradient noise scale" in said
