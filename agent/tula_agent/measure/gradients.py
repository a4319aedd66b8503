"""The global gradient norm, sampled so rarely that its cost stays within a budget per step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch

from tula_agent.measure.async_scalar import PendingScalar, to_number
from tula_agent.torch_private import foreach_norm, is_sharded

SHARE_OF_STEP = 2e-4
"""Budget for reading norms, as a share of the step time..."""
MAX_COST_S, MIN_COST_S = 12e-6, 8e-6
"""...within these bounds per step."""


def squared_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """|G|^2 over dense gradients, a scalar on their device; nothing is copied to the host.

    `foreach_norm` takes a `dtype` only from torch 2.4, so the squares of half-precision norms are
    summed in float32. Norms on other devices are copied one by one; sparse gradients are left out.
    """
    dense = [g for g in gradients if not g.is_sparse]
    if not dense:
        return torch.zeros(())
    norms = foreach_norm(dense)
    first = norms[0]
    total = torch.zeros((), dtype=torch.float32, device=first.device)
    same = [n.float() for n in norms if n.device == first.device]
    total += torch.stack(same).square().sum()
    for norm in norms:
        if norm.device != first.device:
            total += norm.float().square().to(first.device)
    return total


class NormSampler:
    """Decides at which steps the norm is read: in pairs, since gradient variability needs two steps in a row.

    After a pair that took c seconds in all, the next starts `c / allowed` steps later, where allowed is SHARE_OF_STEP
    of the step time within [MIN_COST_S, MAX_COST_S].
    """

    def __init__(self) -> None:
        self.interval = 1
        self.due = 0  # the next step to read
        self._spent = 0.0
        self._first: tuple[int, torch.Tensor] | None = None

    def read(
        self,
        step: int,
        step_time_s: float,
        gradients: Iterable[torch.Tensor],
        loss_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """|G|^2 of this step and, with the step before it, its gradient variability (equation 5), both on the device.

        The second step of a pair sets the time of the next pair by what reading cost. loss_scale: that of a GradScaler
        which leaves unscaling to a fused optimizer.
        """
        started = time.perf_counter()
        squared = squared_norm(gradients)
        if loss_scale is not None:
            squared = squared / loss_scale.to(squared.device).square()
        self._spent += time.perf_counter() - started
        if self._first is None:
            self._first = (step, squared)
            return squared, None
        (before, first), self._first = self._first, None
        allowed = min(MAX_COST_S, max(MIN_COST_S, SHARE_OF_STEP * step_time_s))
        affordable = math.ceil(self._spent / allowed)
        # The first pair pays for loading kernels: its cost says little about the next.
        self.interval = max(2, affordable if self.due else min(affordable, 10))
        self.due = step - 1 + self.interval
        self._spent = 0.0
        return squared, ((squared - first) / first).abs() if step == before + 1 else None


class GradientReader:
    """Reads the first optimizer's gradients just before it steps, from step `due` on.

    `due` is an attribute, so that a step without a reading costs one comparison; it is infinite for sharded parameters,
    whose norm would take a collective while only the first rank reads.
    """

    def __init__(self) -> None:
        self.due: float = 0
        self.interval = 1
        self._norms = NormSampler()
        self._sharded: bool | None = None

    def read(
        self, step: int, step_time_s: float, models: Iterable[torch.nn.Module], optimizer: torch.optim.Optimizer
    ) -> list[tuple[str, float | PendingScalar]]:
        """`grad_norm` and, at the second step of a pair, `gradient_variability` (equation 5), by name.

        step_time_s: of the step before, seconds.
        """
        if self._sharded is None:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._sharded = is_sharded(parameters, models)
        if self._sharded:
            self.due = math.inf
            return []
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        squared, variability = self._norms.read(step, step_time_s, gradients, getattr(optimizer, "grad_scale", None))
        self.due, self.interval = self._norms.due, self._norms.interval
        values = [("grad_norm", to_number(squared, root=True))]
        if variability is not None:
            values.append(("gradient_variability", to_number(variability)))
        return values
