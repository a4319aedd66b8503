"""The baselines behind one call: learning-rate scaling with warm-up, LARS, LAMB and post-local SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tula_agent.scaling.layerwise import LAMB, LARS

__all__ = ["LargeBatch", "Method", "large_batch"]

Method = Literal["linear", "sqrt", "lars", "lamb", "post_local_sgd"]


@dataclass(frozen=True)
class LargeBatch:
    """What a training loop needs of a baseline: step `optimizer`, then `warmup`, then your own schedule.

    `scale`: the factor on the base learning rate once warm-up is over.
    """

    optimizer: torch.optim.Optimizer
    warmup: LambdaLR
    scale: float

    def step(self) -> None:
        """One optimizer step and one step of the warm-up."""
        self.optimizer.step()
        self.warmup.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)


def large_batch(
    optimizer: torch.optim.Optimizer,
    method: Method,
    *,
    global_batch_size: int,
    base_batch_size: int,
    warmup_steps: int = 0,
    model: nn.parallel.DistributedDataParallel | None = None,
    local_steps: int = 4,
    switch_step: int = 0,
    **options: Any,
) -> LargeBatch:
    """Turn an optimizer tuned at `base_batch_size` into baseline `method` at `global_batch_size`.

    linear, sqrt: learning rate times B/base or its root (Goyal et al. 2017; Krizhevsky 2014), rising from the base rate
    over `warmup_steps`. lars, lamb: a new optimizer over the same groups, at the linear respectively square-root rate;
    `options` go to it (trust_coefficient, betas, eps). post_local_sgd: torch's PostLocalSGDOptimizer (Lin et al. 2020):
    synchronous up to `switch_step`, then local steps with weights averaged every `local_steps`; needs `model`, whose
    comm-hook slot it takes.

    A schedule of your own must multiply: give it the returned optimizer, and keep stepping `warmup` beside it through
    `ChainedScheduler`, or step both. Raises ValueError naming the argument at fault.
    """
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}: choose one of {', '.join(get_args(Method))}")
    for name, value in (("global_batch_size", global_batch_size), ("base_batch_size", base_batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}: give a number of examples, at least 1")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}: give 0 or more steps")
    ratio = global_batch_size / base_batch_size
    scale = {"linear": ratio, "lars": ratio, "sqrt": math.sqrt(ratio), "lamb": math.sqrt(ratio)}.get(method, 1.0)
    chosen = optimizer
    if method == "lars":
        chosen = LARS(_groups(optimizer, ("momentum", "weight_decay")), lr=optimizer.defaults["lr"], **options)
    elif method == "lamb":
        chosen = LAMB(_groups(optimizer, ("betas", "weight_decay")), lr=optimizer.defaults["lr"], **options)
    warmup = LambdaLR(chosen, _ramp(scale, warmup_steps))
    if method == "post_local_sgd":
        chosen = _post_local_sgd(optimizer, model, local_steps=local_steps, switch_step=switch_step)
    return LargeBatch(chosen, warmup, scale)


def _ramp(scale: float, warmup_steps: int) -> Any:
    """Factor on the base rate: from 1 up to `scale` in equal steps."""

    def factor(step: int) -> float:
        return scale if step >= warmup_steps else 1.0 + (scale - 1.0) * step / warmup_steps

    return factor


def _groups(optimizer: torch.optim.Optimizer, kept: tuple[str, ...]) -> list[dict[str, Any]]:
    names = ("params", "lr", *kept)
    return [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]


def _post_local_sgd(
    optimizer: torch.optim.Optimizer,
    model: nn.parallel.DistributedDataParallel | None,
    *,
    local_steps: int,
    switch_step: int,
) -> torch.optim.Optimizer:
    if model is None or not dist.is_initialized():
        raise ValueError("post_local_sgd needs model, wrapped in DistributedDataParallel: give model=ddp")
    # Here and not above: these modules are slow to import, and few jobs need them.
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    # A subgroup of one rank: after the switch every rank steps alone until the next average.
    alone, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
    state = PostLocalSGDState(  # type: ignore[no-untyped-call]
        process_group=None, subgroup=alone, start_localSGD_iter=switch_step
    )
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=local_steps, warmup_steps=switch_step)
    return PostLocalSGDOptimizer(optim=optimizer, averager=averager)
