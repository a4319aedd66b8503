"""The rule for the learning rate: by optimizer, batch normalization and how many times the base batch."""

from __future__ import annotations

from typing import Any

import pytest

from tula_service.analysis.scaling import learning_rate_advice, learning_rate_factor, scaling_rule
from tula_wire import ModelSpec


@pytest.mark.parametrize(
    ("facts", "times", "rule", "said"),
    [
        ({}, 1.0, None, ""),
        (
            {},
            4.0,
            "gain",
            "a batch of 64 by 3.2, which follows from the gradient noise scale; `TulaOptimizer` does it.",
        ),
        (
            {"batch_normalization": True},
            8.0,
            "gain",
            "a batch of 64 by 3.2, which follows from the gradient noise scale",
        ),
        ({"batch_normalization": True}, 32.0, "gain", "beyond 16 times the batch; try LARS there too."),
        ({"batch_normalization": False}, 32.0, "gain", "beyond 16 times the batch."),
        ({"optimizer": "adam"}, 16.0, "gain", "a batch of 64 by 1.8, which follows from the gradient noise scale"),
        ({"optimizer": "other"}, 4.0, None, "a batch of 64 by 3.2, which follows from the gradient noise scale"),
    ],
)
def test_the_rule_and_its_sentence(facts: dict[str, Any], times: float, rule: str | None, said: str) -> None:
    model = ModelSpec.model_validate({"name": "net", **facts})
    assert scaling_rule(model, times) == rule
    assert said in learning_rate_advice(model, 64, times, 3.2)
    assert bool(learning_rate_advice(model, 64, times, 3.2)) == (times > 1.0)


def test_without_a_noise_scale_the_range_is_said() -> None:
    assert "64 by 1 to 4:" in learning_rate_advice(ModelSpec(name="net"), 64, 4.0, None)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "other"])
@pytest.mark.parametrize("normalization", [True, False, None])
@pytest.mark.parametrize("times", [1.0, 4.0, 64.0])
@pytest.mark.parametrize("by_noise_scale", [None, 3.2])
def test_the_factor_is_the_number_of_the_sentence_and_of_the_rule(
    optimizer: str, normalization: bool | None, times: float, by_noise_scale: float | None
) -> None:
    model = ModelSpec.model_validate({"name": "net", "optimizer": optimizer, "batch_normalization": normalization})
    rule, said = scaling_rule(model, times), learning_rate_advice(model, 64, times, by_noise_scale)
    found = learning_rate_factor(model, times, by_noise_scale)
    root = optimizer == "adam"
    if times == 1.0:
        assert (rule, found, said) == (None, 1.0, "")
    elif found is None:
        assert by_noise_scale is None
        assert f"64 by 1 to {times**0.5 if root else times:.3g}:" in said
    else:
        assert found == pytest.approx(3.2**0.5 if root else 3.2)
        assert f"64 by {found:.2g}, which follows from the gradient noise scale" in said
