"""Numbers that frameworks log, by telemetry column, and what `Run.log` gives to Weights & Biases."""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Mapping
from typing import Any

_KNOWN = {
    "train_loss": "loss",
    "acc": "accuracy",
    "train_acc": "accuracy",
    "train_accuracy": "accuracy",
    "val_acc": "validation_accuracy",
    "val_accuracy": "validation_accuracy",
    "eval_acc": "validation_accuracy",
    "eval_accuracy": "validation_accuracy",
    "learning_rate": "lr",
}

_WITH_AXIS: weakref.WeakSet[Any] = weakref.WeakSet()
"""wandb's runs that know the axis of what the agent logs."""


def columns(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and one-element tensors of `metrics` by column name: lower-case letters, digits and underscores."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not numeric and not (hasattr(value, "numel") and value.numel() == 1):
            continue
        plain = re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")[:64]
        plain = _KNOWN.get(plain, plain)
        if plain and plain[0].isalpha():
            found[plain] = value
    return found


def log_to_wandb(values: Mapping[str, Any], step: int) -> None:
    """Log `values` of the agent's `step` to the script's wandb run, if it has one, as `tula/NAME` over `tula/step`.

    Their own axis, and no `step=`: one that is higher than the script's next makes wandb drop the script's values.
    """
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None:
        if run not in _WITH_AXIS:
            _WITH_AXIS.add(run)
            run.define_metric("tula/*", step_metric="tula/step")
        run.log({f"tula/{name}": value for name, value in values.items() if value is not None} | {"tula/step": step})
