"""Samples the global gradient norm, rarely enough that the mean cost per step stays within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch

from tula_agent.readings import HostCopy, to_number
from tula_agent.torch_private import is_sharded, norm_squared

SHARE_OF_STEP = 2e-4
"""Budget for reading norms, as a fraction of the step time."""
MAX_COST_S, MIN_COST_S = 12e-6, 8e-6
"""Upper and lower bound of the budget for reading norms, in seconds per step."""


class GradientReader:
    """Reads the gradients of the first optimizer just before it steps, beginning with step `due`.

    Readings come in pairs, since gradient variability is computed from two consecutive steps. After a pair that took c
    seconds in total, the next pair begins `c / allowed` steps later, where `allowed` is SHARE_OF_STEP times the step
    time, limited to [MIN_COST_S, MAX_COST_S]. `due` is an attribute, so that a step without a reading costs only one
    comparison. For sharded parameters, `due` is infinite, since computing their norm would require a collective, but
    only the first rank reads gradients.
    """

    def __init__(self) -> None:
        self.due: float = 0
        self._spent = 0.0
        self._first: tuple[int, torch.Tensor] | None = None

    def read(
        self, step: int, step_time_s: float, models: Iterable[torch.nn.Module], optimizer: torch.optim.Optimizer
    ) -> list[tuple[str, float | HostCopy]]:
        """Return `grad_norm` of the dense gradients and, at a pair's second step, `gradient_variability` (equation 5).

        step_time_s: the time of the previous step in seconds.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.due == 0 and is_sharded(parameters, models):
            self.due = math.inf
            return []
        started = time.perf_counter()
        squared = norm_squared([p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse])
        loss_scale = getattr(optimizer, "grad_scale", None)  # set by a GradScaler if a fused optimizer unscales
        if loss_scale is not None:
            squared = squared / loss_scale.to(squared.device).square()
        self._spent += time.perf_counter() - started
        values = [("grad_norm", to_number(squared.sqrt()))]
        if self._first is None:
            self._first = (step, squared)
            return values
        (before, first), self._first = self._first, None
        allowed = min(MAX_COST_S, max(MIN_COST_S, SHARE_OF_STEP * step_time_s))
        affordable = math.ceil(self._spent / allowed)
        # The first pair includes the loading of kernels, so its cost is not representative.
        self.due = step - 1 + max(2, affordable if self.due else min(affordable, 10))
        self._spent = 0.0
        if step == before + 1:
            values.append(("gradient_variability", to_number(((squared - first) / first).abs())))
        return values
