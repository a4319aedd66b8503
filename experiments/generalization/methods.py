"""Defines the methods to compare, each of which adapts SGD or AdamW at the base learning rate to the large batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from experiments.generalization.cases import Case
from tula_agent.scaling import Ags, Gain, TulaOptimizer
from tula_agent.scaling.rule import SpikeClip

WARMUP_EPOCHS = 5
WEIGHT_DECAY = 5e-4  # with SGD
ADAM_WEIGHT_DECAY = 0.01
ADAM_BETAS = (0.9, 0.999)
POST_LOCAL_SYNCS_PER_EPOCH = 4


@dataclass(frozen=True)
class Method:
    """One way to train at the large batch.

    `kind` is `sgd`, `adamw`, `lars`, `muon`, `tula` (around SGD or AdamW, depending on the case) or `post_local` (SGD
    with local steps after the first decay; see train.py).
    `role` is `reference`, `paper`, `baseline`, `tuned`, `default`, `part` (a part of the default, in every table) or
    `ablation`.
    `options` are keyword arguments of the optimizer.
    `tuned_as` is the name of the small-batch method whose base rate is used.
    `rate_factor` multiplies the learning rate after the warm-up, and is a number or a rule: `linear` is B / base
    (Goyal et al. 2017), and `root` is its square root (Krizhevsky 2014).
    With `malladi`, Adam's betas depend on the batch: 1 - beta is multiplied by B / base (Malladi et al. 2022).
    `published_rate` is the method's published base rate, if this is used instead of a tuned one.
    With `cut`, gradients longer than twice the usual length are clipped to twice the usual length by the product's own
    `SpikeClip`.
    """

    name: str
    kind: str
    role: str
    options: dict[str, Any] = field(default_factory=dict)
    rate_factor: float | Literal["linear", "root"] = 1.0
    warmup_epochs: int = 0
    malladi: bool = False
    cut: bool = False
    tuned_as: str = "small batch"
    published_rate: float | None = None


def multiplier(value: float, kind: str = "sgd") -> Method:
    """Return a method tuned by hand: a constant learning-rate factor, reached by a warm-up, and clipping (`cut`)."""
    return Method(f"x{value:g}", kind, "tuned", rate_factor=value, warmup_epochs=WARMUP_EPOCHS, cut=True)


SMALL = Method("small batch", "sgd", "reference")
SMALL_LARS = Method("small batch, LARS", "lars", "reference", tuned_as="small batch, LARS")
SMALL_ADAM = Method("small batch", "adamw", "reference")


class _Weight1(Gain):
    noise_weight = 1.0


class _Weight2(Gain):
    noise_weight = 2.0


class _Growth14(Gain):
    growth = 1.4


class _AdaScale(_Weight1):
    growth = None


class _Alone(Gain):
    damping = None


class _Undamped(Gain):
    damping = 0.0


_TULA = (
    Method("AGS", "tula", "paper", {"policy": "ags"}),
    Method("Tula default", "tula", "default", {"policy": "gain"}),
    Method("gain c=1", "tula", "ablation", {"policy": _Weight1()}),
    Method("gain c=2", "tula", "ablation", {"policy": _Weight2()}),
    Method("gain, growth 1.4", "tula", "ablation", {"policy": _Growth14()}),
    Method("gain, spikes", "tula", "ablation", {"policy": Gain(spike_limit=None)}),
    Method("AdaScale gain", "tula", "ablation", {"policy": _AdaScale(spike_limit=None)}),
)
_PARTS = (
    # These show what the direction adds, and what the noise adds to it; only for SGD, since AdamW keeps its direction.
    Method("gain alone", "tula", "part", {"policy": _Alone()}),
    Method("undamped", "tula", "part", {"policy": _Undamped()}),
)
_LINEAR: dict[str, Any] = {"rate_factor": "linear", "warmup_epochs": WARMUP_EPOCHS}
METHODS = (
    Method("LBT", "sgd", "reference"),
    Method("linear", "sgd", "baseline", **_LINEAR),
    Method("linear, cut", "sgd", "baseline", cut=True, **_LINEAR),
    Method("root", "sgd", "baseline", rate_factor="root"),
    Method("LARS", "lars", "baseline", tuned_as=SMALL_LARS.name, **_LINEAR),
    Method("post-local SGD", "post_local", "baseline", **_LINEAR),
    Method("Muon", "muon", "baseline", published_rate=0.02),
    *_TULA,
    *_PARTS,
)
ADAM_METHODS = (
    Method("LBT", "adamw", "reference"),
    Method("linear", "adamw", "baseline", malladi=True, **_LINEAR),
    Method("linear, cut", "adamw", "baseline", malladi=True, cut=True, **_LINEAR),
    Method("root", "adamw", "baseline", rate_factor="root", warmup_epochs=WARMUP_EPOCHS, malladi=True),
    *_TULA,
)


def methods_for(case: Case) -> tuple[Method, ...]:
    """Return the methods that are compared on `case`."""
    return ADAM_METHODS if case.adam else METHODS


def small_methods(case: Case) -> tuple[Method, ...]:
    """Return the small-batch methods with which learning rates are chosen."""
    return (SMALL_ADAM,) if case.adam else (SMALL, SMALL_LARS)


@dataclass
class Prepared:
    """An optimizer, the learning rate of each step before the common decay, and the function that clips gradients."""

    optimizer: torch.optim.Optimizer
    rates: Iterator[float]
    clip: SpikeClip | None = None


def prepare(method: Method, case: Case, network: nn.Module, *, learning_rate: float, steps_per_epoch: int) -> Prepared:
    """Prepare `method` for `network`, with SGD (momentum 0.9, weight decay 5e-4) or AdamW (weight decay 0.01)."""
    learning_rate = learning_rate if method.published_rate is None else method.published_rate
    optimizer = _optimizer(method, case, network, learning_rate, steps_per_epoch)
    factor = _rate_factor(method, case)
    return Prepared(
        optimizer,
        _ramp(learning_rate, factor, steps_per_epoch * method.warmup_epochs),
        SpikeClip(2.0) if method.cut else None,
    )


def _optimizer(
    method: Method, case: Case, network: nn.Module, learning_rate: float, steps_per_epoch: int
) -> torch.optim.Optimizer:
    if method.kind == "lars":
        import pytorch_optimizer  # imported here, since the import takes seconds and only one method needs it

        # The library's default is the published trust coefficient of 0.001 (You et al. 2017).
        layerwise: torch.optim.Optimizer = pytorch_optimizer.LARS(
            network.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY, **method.options
        )
        return layerwise
    if method.kind == "muon":
        return _muon(network, learning_rate)
    inner = _inner(method, case, network, learning_rate)
    if method.kind != "tula":
        return inner
    policy = method.options["policy"]
    if policy == "ags":
        policy = Ags(
            steps_per_epoch=steps_per_epoch,
            model=network,
            loss=lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]),
        )
    sizes = {"global_batch_size": case.batch_size, "small_batch_size": case.base_batch_size}
    return TulaOptimizer(inner, policy=policy, **sizes)


def _muon(network: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Return Muon as published (Jordan et al. 2024), with AdamW at 3e-4 for vectors and for the last layer."""
    import pytorch_optimizer

    parameters = list(network.parameters())
    last = max(index for index, parameter in enumerate(parameters) if parameter.ndim >= 2)
    hidden = [p for index, p in enumerate(parameters) if p.ndim >= 2 and index != last]
    rest = [p for index, p in enumerate(parameters) if p.ndim < 2 or index == last]
    optimizer: torch.optim.Optimizer = pytorch_optimizer.Muon(
        [
            {"params": hidden, "lr": learning_rate, "use_muon": True, "rate_share": 1.0},
            {"params": rest, "lr": 3e-4, "use_muon": False, "rate_share": 3e-4 / learning_rate},
        ]
    )
    return optimizer


def _inner(method: Method, case: Case, network: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    if not case.adam:
        return torch.optim.SGD(network.parameters(), lr=learning_rate, momentum=0.9, weight_decay=WEIGHT_DECAY)
    betas, eps = ADAM_BETAS, 1e-8
    if method.malladi:
        ratio = case.batch_size / case.base_batch_size
        betas = max(0.0, 1.0 - ratio * (1.0 - betas[0])), max(0.0, 1.0 - ratio * (1.0 - betas[1]))
        eps /= math.sqrt(ratio)
    return torch.optim.AdamW(
        network.parameters(), lr=learning_rate, betas=betas, eps=eps, weight_decay=ADAM_WEIGHT_DECAY
    )


def _rate_factor(method: Method, case: Case) -> float:
    ratio = case.batch_size / case.base_batch_size
    if method.rate_factor == "linear":
        return ratio
    return math.sqrt(ratio) if method.rate_factor == "root" else method.rate_factor


def _ramp(rate: float, scale: float, warmup_steps: int) -> Iterator[float]:
    """Yield the learning rate of each step, which rises linearly from `rate` to `rate` x `scale` and then stays
    constant.
    """
    step = 0
    while True:
        yield rate * (scale if step >= warmup_steps else 1.0 + (scale - 1.0) * step / warmup_steps)
        step += 1
