"""A small-batch gradient from a second forward and backward on part of the current batch.

Used where neither ranks nor micro-steps provide one: it costs about one more step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tula_agent.measure.step_timer import map_tensors
from tula_agent.scaling.ranks import Ranks

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
"""Mean loss of the bare module on a batch; enters autocast itself where training uses it."""


def sub_batch(batch: Any, size: int) -> Any:
    """The first `size` examples: every tensor is cut along dimension 0."""
    return map_tensors(batch, lambda tensor: tensor[:size] if tensor.ndim else tensor)


def batch_length(batch: Any) -> int:
    """Examples in `batch`: the length of its first tensor; 0 when it holds none."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((n for n in map(batch_length, batch) if n), 0)
    return 0


def probe_gradients(
    model: nn.Module, loss: LossFunction, batch: Any, parameters: Sequence[torch.Tensor], *, ranks: Ranks
) -> list[torch.Tensor | None]:
    """Gradient of `loss` on `batch`, averaged over ranks, one tensor per parameter (None where it has no part).

    Leaves training unchanged: it does not write `.grad` (so DDP's reducer does not start), and restores random streams
    and all buffers (batch normalization's running statistics). The module stays in training mode, because evaluation
    mode would give a different, smaller gradient. Every rank must call it in the same step.
    """
    module = model.module if hasattr(model, "module") and isinstance(model.module, nn.Module) else model
    wanted = [p for p in parameters if p.requires_grad]
    devices = sorted({p.device.index for p in wanted if p.device.type == "cuda" and p.device.index is not None})
    with torch.random.fork_rng(devices=devices), _buffers_kept(module), torch.enable_grad():
        found = torch.autograd.grad(loss(module, batch), wanted, allow_unused=True)
    by_parameter = {id(p): g for p, g in zip(wanted, found, strict=True)}
    gradients = [by_parameter.get(id(p)) for p in parameters]
    if ranks.size == 1:
        return gradients
    # Not in place: autograd may return one tensor for two parameters, or one whose elements share memory.
    return [g if g is None or g.is_sparse else ranks.sum_(torch.div(g, ranks.size)) for g in gradients]


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
