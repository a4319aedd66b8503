"""The rule for the learning rate: by optimizer, batch normalization and how many times the base batch."""

from __future__ import annotations

from typing import Any

import pytest

from tula_service.analysis.learning_rate import advice, scaling_rule
from tula_wire import ModelSpec


@pytest.mark.parametrize(
    ("facts", "times", "rule", "said"),
    [
        ({}, 1.0, None, ""),
        ({}, 4.0, "gain", "a batch of 64 times 3.2, by the gradient noise scale; `TulaOptimizer` applies it."),
        ({}, 8.0, "gain", "say `model.batch_normalization`"),
        ({"batch_normalization": False}, 8.0, "gain", "`TulaOptimizer` applies it."),
        ({"batch_normalization": True}, 4.0, "gain", "`TulaOptimizer` applies it."),
        ({"batch_normalization": True}, 8.0, "linear", "a batch of 64 times 8, reached in a warm-up"),
        (
            {"optimizer": "adam", "batch_normalization": True},
            16.0,
            "unscaled",
            "Keep the learning rate of a batch of 64",
        ),
        ({"optimizer": "other"}, 4.0, None, "a batch of 64 times 3.2, by the gradient noise scale"),
    ],
)
def test_the_rule_and_its_sentence(facts: dict[str, Any], times: float, rule: str | None, said: str) -> None:
    model = ModelSpec.model_validate({"name": "net", **facts})
    assert scaling_rule(model, times) == rule
    assert said in advice(model, 64, times, 3.2)
    assert bool(advice(model, 64, times, 3.2)) == (times > 1.0)


def test_without_a_noise_scale_the_range_is_said() -> None:
    assert "64 times 1 to 4:" in advice(ModelSpec(name="net"), 64, 4.0, None)
