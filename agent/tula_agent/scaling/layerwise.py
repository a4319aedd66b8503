"""LARS and LAMB: baselines that set the step of each tensor by the ratio of its norm to its update's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["LAMB", "LARS"]


class _Layerwise(torch.optim.Optimizer):
    """Shared: walk the groups, skip missing gradients, refuse sparse ones."""

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the loss of `closure` if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if weight.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} takes no sparse gradients: use dense embeddings")
                self._update(weight, weight.grad, group)
        return loss


class LARS(_Layerwise):
    """Layer-wise adaptive rate scaling (You et al. 2017, algorithm 1).

    Local rate = trust_coefficient |w| / (|g| + weight_decay |w| + eps) for tensors of two dimensions and more; biases
    and norm weights take plain momentum SGD without decay, as is customary.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        update = gradient
        if weight.ndim >= 2:
            update = gradient.add(weight, alpha=group["weight_decay"])
            norm = torch.linalg.vector_norm(weight)
            size = torch.linalg.vector_norm(gradient) + group["weight_decay"] * norm
            trust = torch.where(
                (norm > 0) & (size > 0),
                group["trust_coefficient"] * norm / (size + group["eps"]),
                torch.ones_like(norm),
            )
            update = update * trust
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        # The rate is inside the buffer, as in the paper: a later change of it leaves past steps alone.
        state["momentum_buffer"].mul_(group["momentum"]).add_(update, alpha=group["lr"])
        weight.sub_(state["momentum_buffer"])


class LAMB(_Layerwise):
    """Layer-wise adaptive moments (You et al. 2020, algorithm 2), with bias correction and decoupled decay.

    Step = lr |w| / |u| u, u = m / (sqrt(v) + eps) + weight_decay w, for tensors of two dimensions and more; biases and
    norm weights take lr m / (sqrt(v) + eps), without decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state = self.state[weight]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        mean = state["exp_avg"] / (1 - first ** state["step"])
        spread = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        update = mean.div_(spread)
        norm = torch.linalg.vector_norm(weight)
        if weight.ndim >= 2:
            update.add_(weight, alpha=group["weight_decay"])
            size = torch.linalg.vector_norm(update)
            update.mul_(torch.where((norm > 0) & (size > 0), norm / size, torch.ones_like(norm)))
        weight.add_(update, alpha=-group["lr"])
