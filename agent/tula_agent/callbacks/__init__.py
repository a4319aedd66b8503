"""Contains callbacks for training frameworks.

Each module imports one framework, so import only the module that is needed.
"""

from __future__ import annotations

import math
import re
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


def columns(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the finite numbers and one-element tensors in `metrics`, keyed by column name.

    Column names consist of lower-case letters, digits and underscores.
    """
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not numeric and not (hasattr(value, "numel") and value.numel() == 1):
            continue
        plain = re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")[:64]
        plain = _KNOWN.get(plain, plain)
        if plain and plain[0].isalpha():
            numbers[plain] = value
    return numbers
