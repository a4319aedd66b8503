"""The methods compared: each turns plain SGD at the base learning rate into what trains at the large batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from experiments.generalization.cases import BASE_BATCH_SIZE, Case
from tula_agent.scaling import TulaOptimizer, large_batch

__all__ = ["METHODS", "Method", "Prepared", "multiplier", "prepare"]

PAPER_BASE_BATCH_SIZE = 128  # of the linear scaling rule in the paper's Table I
WARMUP_EPOCHS = 5
POST_LOCAL_AFTER_EPOCHS = 5
POST_LOCAL_SYNCS_PER_EPOCH = 4


@dataclass(frozen=True)
class Method:
    """`kind`: plain, large_batch, tula or post_local; `role`: reference, paper, baseline, tuned, default, ablation."""

    name: str
    kind: str
    role: str
    options: dict[str, Any] = field(default_factory=dict)


def multiplier(value: float) -> Method:
    """Large batch with a constant factor on the learning rate."""
    return Method(f"x{value:g}", "plain", "tuned", {"multiplier": value})


_BARE = {"policy": "gain", "growth": None, "spike_limit": None}
SMALL = Method("small batch", "plain", "reference")
METHODS = (
    Method("LBT", "plain", "reference"),
    Method("LRS", "large_batch", "baseline", {"method": "linear", "base_batch_size": PAPER_BASE_BATCH_SIZE}),
    Method("sqrt LR", "large_batch", "baseline", {"method": "sqrt", "warmup_epochs": 0}),
    Method("LARS", "large_batch", "baseline", {"method": "lars", "trust_coefficient": 0.02}),
    Method("post-local SGD", "post_local", "baseline"),
    Method("AGS tensor", "tula", "paper", {"policy": "ags", "source": "probe"}),
    Method("AGS element", "tula", "paper", {"policy": "ags", "source": "probe", "granularity": "element"}),
    Method("Tula default", "tula", "default", {"policy": "gain"}),
    Method("AdaScale gain", "tula", "ablation", {**_BARE, "noise_weight": 1.0}),
    Method("gain c=2", "tula", "ablation", {"policy": "gain", "noise_weight": 2.0}),
    Method("gain c=8", "tula", "ablation", {"policy": "gain", "noise_weight": 8.0}),
    Method("gain, spikes", "tula", "ablation", {"policy": "gain", "spike_limit": None}),
    Method("gain, no limits", "tula", "ablation", _BARE),
)


@dataclass
class Prepared:
    """An optimizer and, per step, its learning rate before the common decay."""

    optimizer: torch.optim.Optimizer
    rates: Iterator[float]


def prepare(method: Method, case: Case, network: nn.Module, *, learning_rate: float, steps_per_epoch: int) -> Prepared:
    """Build `method` over `network`; momentum 0.9 and weight decay 5e-4 everywhere."""
    sgd = torch.optim.SGD(network.parameters(), lr=learning_rate, momentum=0.9, weight_decay=5e-4)
    options = dict(method.options)
    if method.kind == "large_batch":
        warmup_steps = steps_per_epoch * options.pop("warmup_epochs", WARMUP_EPOCHS)
        base = options.pop("base_batch_size", BASE_BATCH_SIZE)
        baseline = large_batch(
            sgd, global_batch_size=case.batch_size, base_batch_size=base, warmup_steps=warmup_steps, **options
        )
        return Prepared(baseline.optimizer, _ramp(learning_rate, baseline.scale, warmup_steps))
    if method.kind == "tula":
        tula = TulaOptimizer(
            sgd,
            global_batch_size=case.batch_size,
            small_batch_size=BASE_BATCH_SIZE,
            steps_per_epoch=steps_per_epoch,
            model=network,
            loss=lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]),
            **options,
        )
        return Prepared(tula, _ramp(learning_rate, 1.0, 0))
    return Prepared(sgd, _ramp(learning_rate, options.get("multiplier", 1.0), 0))


def _ramp(rate: float, scale: float, warmup_steps: int) -> Iterator[float]:
    step = 0
    while True:
        yield rate * (scale if step >= warmup_steps else 1.0 + (scale - 1.0) * step / warmup_steps)
        step += 1
