"""How far the local batch can grow before memory runs out, from what the running job has used so far (equation 3)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from tula_agent.guard import logger
from tula_agent.measure.memory import Memory, gradient_bytes
from tula_agent.torch_private import ddp_models

__all__ = ["ALLOCATOR_SLACK", "Headroom", "bucket_bytes"]

ALLOCATOR_SLACK = 0.02
"""Share of the capacity that stays free for the allocator's rounding."""


def bucket_bytes(models: Iterable[torch.nn.Module]) -> int:
    """Bytes of DDP's buckets where they are a copy of the gradients: held at every batch size, counted nowhere else."""
    return gradient_bytes([m for m in ddp_models(models) if not getattr(m, "gradient_as_bucket_view", False)])


class Headroom:
    """Predicts the largest local batch that fits, before it is tried.

    Memory is `static + fixed + b * slope`: static parts are counted, and what grows (activations, batch) is measured.
    From one batch size b all of it is taken to grow, so that the answer errs on the small side by what in truth is
    fixed (work space); from two, the slope is the line through the smallest and the largest.
    """

    def __init__(self) -> None:
        self._grown: dict[int, float] = {}  # by local batch size, bytes beyond everything counted
        self._room = 0.0
        self._said = False

    def observe(self, memory: Memory, local_batch_size: int, fixed_bytes: int = 0) -> None:
        """The peak so far, after steps with at most `local_batch_size` examples; ignored where a part is unknown."""
        grows = memory.activation_bytes
        if grows is None or memory.gradient_bytes is None or memory.capacity_bytes is None:
            return
        static = (memory.parameter_bytes or 0) + memory.gradient_bytes + (memory.optimizer_bytes or 0)
        held = static + (memory.context_bytes or 0) + fixed_bytes
        self._room = memory.capacity_bytes * (1 - ALLOCATOR_SLACK) - held
        self._grown[local_batch_size] = max(0, grows + (memory.batch_bytes or 0) - fixed_bytes)

    def largest_local_batch_size(self) -> int | None:
        """The largest batch that should fit, at least the largest that did; None while too little is known."""
        if not self._grown:
            return None
        smallest, largest = min(self._grown), max(self._grown)
        if smallest < largest:
            slope = (self._grown[largest] - self._grown[smallest]) / (largest - smallest)
        else:
            slope = self._grown[largest] / largest
        if slope <= 0:
            return None
        more = (self._room - self._grown[largest]) / slope
        answer = max(largest, largest + math.floor(more))
        if not self._said:
            self._said = True
            logger.info("batches of up to %d examples per rank should fit into memory", answer)
        return answer
