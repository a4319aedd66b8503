"""Which rule for the learning rate goes with a larger batch: the best of our experiments on such networks.

The evidence is `experiments/generalization/results/quick.json`; `tests/test_figures.py` compares these rules with it.
"""

from __future__ import annotations

from typing import Final

import tula_wire as wire
from tula_wire.recommendations import ScalingRule

MANY_TIMES: Final = 8.0
"""The least ratio of batches at which batch normalization made a difference between rules."""
_MEASURED = ("sgd", "momentum", "adam")


def scaling_rule(model: wire.ModelSpec, times: float) -> ScalingRule | None:
    """The rule at `times` the base batch; None at the base batch, and for optimizers that no experiment used."""
    if times <= 1.0 or model.optimizer not in _MEASURED:
        return None
    if model.optimizer == "adam":
        return "unscaled"
    return "linear" if model.batch_normalization and times >= MANY_TIMES else "gain"


def factor(model: wire.ModelSpec, times: float, by_noise_scale: float | None) -> float | None:
    """The learning rate over that of the base batch, by the rule; None where the unknown noise scale decides it.

    by_noise_scale: the factor that the gradient noise scale gives; None where that is unknown.
    """
    rule = scaling_rule(model, times)
    if rule == "unscaled" or times == 1.0:
        return 1.0
    return times if rule == "linear" else by_noise_scale


def advice(model: wire.ModelSpec, base_batch_size: int, times: float, by_noise_scale: float | None) -> str:
    """What to do with the learning rate of the base batch, in words; nothing at that batch.

    by_noise_scale: as of `factor`, which is the number in the sentence.
    """
    rule = scaling_rule(model, times)
    start = f"The learning rate is that of a batch of {base_batch_size} times"
    if times <= 1.0:
        return ""
    if rule == "unscaled":
        return (
            f"Keep the learning rate of a batch of {base_batch_size} at first: under Adam no rule was better in our "
            "experiment, at 16 times the batch."
        )
    if rule == "linear":
        return (
            f"{start} {times:.3g}, reached in a warm-up: with batch normalization, at {MANY_TIMES:g} times the batch, "
            "linear scaling was better than `TulaOptimizer` in our experiment."
        )
    if by_noise_scale is not None:
        found = f"{start} {by_noise_scale:.2g}, by the gradient noise scale; `TulaOptimizer` applies it."
    else:
        found = f"{start} 1 to {times:.3g}: the gradient noise scale, which `TulaOptimizer` measures, says which."
    if rule == "gain" and model.batch_normalization is None and times >= MANY_TIMES:
        found += " With batch normalization another rule may be better: say `model.batch_normalization`."
    return found
