"""The methods compared: each turns plain SGD at the base learning rate into what trains at the large batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from experiments.generalization.cases import BASE_BATCH_SIZE, Case
from tula_agent.scaling import GainRule, TulaOptimizer

PAPER_BASE_BATCH_SIZE = 128  # of the linear scaling rule in the paper's Table I
WARMUP_EPOCHS = 5
WEIGHT_DECAY = 5e-4
POST_LOCAL_AFTER_EPOCHS = 5
POST_LOCAL_SYNCS_PER_EPOCH = 4


@dataclass(frozen=True)
class Method:
    """One way to train at the large batch.

    `kind`: `sgd`, `lars`, `lamb`, `tula` or `post_local` (SGD, then local steps: see train.py).
    `role`: `reference`, `paper`, `baseline`, `tuned`, `default` or `ablation`.
    `options`: keyword arguments of the optimizer.
    `rate_factor`: the learning rate's factor once warm-up is over, or the rule that gives it: `linear` is B / base
    (Goyal et al. 2017), `root` its square root (Krizhevsky 2014).
    """

    name: str
    kind: str
    role: str
    options: dict[str, Any] = field(default_factory=dict)
    rate_factor: float | Literal["linear", "root"] = 1.0
    base_batch_size: int = BASE_BATCH_SIZE
    warmup_epochs: int = 0


def multiplier(value: float) -> Method:
    """Large batch with a constant factor on the learning rate."""
    return Method(f"x{value:g}", "sgd", "tuned", rate_factor=value)


SMALL = Method("small batch", "sgd", "reference")
METHODS = (
    Method("LBT", "sgd", "reference"),
    Method(
        "LRS",
        "sgd",
        "baseline",
        rate_factor="linear",
        base_batch_size=PAPER_BASE_BATCH_SIZE,
        warmup_epochs=WARMUP_EPOCHS,
    ),
    Method("sqrt LR", "sgd", "baseline", rate_factor="root"),
    Method(
        "LARS",
        "lars",
        "baseline",
        {"trust_coefficient": 0.02},
        rate_factor="linear",
        warmup_epochs=WARMUP_EPOCHS,
    ),
    Method("post-local SGD", "post_local", "baseline"),
    Method("AGS tensor", "tula", "paper", {"policy": "ags", "granularity": "tensor"}),
    Method("AGS element", "tula", "paper", {"policy": "ags"}),
    Method("Tula default", "tula", "default", {"policy": "gain"}),
    Method("AdaScale gain", "tula", "ablation", {"rule": GainRule(noise_weight=1.0, growth=None, spike_limit=None)}),
    Method("gain c=2", "tula", "ablation", {"rule": GainRule(noise_weight=2.0)}),
    Method("gain c=8", "tula", "ablation", {"rule": GainRule(noise_weight=8.0)}),
    Method("gain, spikes", "tula", "ablation", {"rule": GainRule(spike_limit=None)}),
    Method("gain, no limits", "tula", "ablation", {"rule": GainRule(growth=None, spike_limit=None)}),
    Method("LAMB", "lamb", "ablation", rate_factor="root", warmup_epochs=WARMUP_EPOCHS),
)


@dataclass
class Prepared:
    """An optimizer and, per step, its learning rate before the common decay."""

    optimizer: torch.optim.Optimizer
    rates: Iterator[float]


def prepare(method: Method, case: Case, network: nn.Module, *, learning_rate: float, steps_per_epoch: int) -> Prepared:
    """Build `method` over `network`; momentum 0.9 and weight decay 5e-4 everywhere."""
    optimizer = _optimizer(method, case, network, learning_rate, steps_per_epoch)
    warmup_steps = steps_per_epoch * method.warmup_epochs
    return Prepared(optimizer, _ramp(learning_rate, _rate_factor(method, case), warmup_steps))


def _optimizer(
    method: Method, case: Case, network: nn.Module, learning_rate: float, steps_per_epoch: int
) -> torch.optim.Optimizer:
    if method.kind in ("lars", "lamb"):
        import pytorch_optimizer  # here, since it takes seconds to import and one method needs it

        kind = pytorch_optimizer.LARS if method.kind == "lars" else pytorch_optimizer.Lamb
        layerwise: torch.optim.Optimizer = kind(
            network.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY, **method.options
        )
        return layerwise
    sgd = torch.optim.SGD(network.parameters(), lr=learning_rate, momentum=0.9, weight_decay=WEIGHT_DECAY)
    if method.kind != "tula":
        return sgd
    return TulaOptimizer(
        sgd,
        global_batch_size=case.batch_size,
        small_batch_size=BASE_BATCH_SIZE,
        steps_per_epoch=steps_per_epoch,
        model=network,
        loss=lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]),
        **method.options,
    )


def _rate_factor(method: Method, case: Case) -> float:
    ratio = case.batch_size / method.base_batch_size
    if method.rate_factor == "linear":
        return ratio
    return math.sqrt(ratio) if method.rate_factor == "root" else method.rate_factor


def _ramp(rate: float, scale: float, warmup_steps: int) -> Iterator[float]:
    """The learning rate of each step: from `rate` up to `rate` x `scale` in equal steps, then constant."""
    step = 0
    while True:
        yield rate * (scale if step >= warmup_steps else 1.0 + (scale - 1.0) * step / warmup_steps)
        step += 1
