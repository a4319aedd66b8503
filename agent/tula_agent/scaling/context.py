"""The part of the training job that a scaling policy works on: optimizer, ranks, gradient taps and current batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from tula_agent.scaling.gradient_tap import GradientTap
from tula_agent.scaling.probe import LossFunction, batch_length, probe_gradients, sub_batch
from tula_agent.scaling.ranks import Ranks
from tula_agent.scaling.thresholds import ScalingThresholds

Source = Literal["auto", "parts", "probe"]


@dataclass
class ScalingContext:
    """Shared by the optimizer and its policies; `thresholds` change only between two steps.

    `counted_batch_size`: examples per step counted over all ranks, for a job that does not give its global batch size.
    A rank's own batch would not do: the last one of an epoch may be shorter on some ranks, and their factors would
    differ.
    """

    inner: torch.optim.Optimizer
    ranks: Ranks
    tap: GradientTap
    thresholds: ScalingThresholds
    global_batch_size: int | None
    source: Source
    model: nn.Module | None
    loss: LossFunction | None
    batch: Any = None
    counted_batch_size: int | None = None
    last_count: int = 0
    _observed: int = 0
    _longest: int = 0

    def parameters(self) -> list[torch.Tensor]:
        """All parameters, group by group."""
        return [p for group in self.inner.param_groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """Of the first parameter: numbers for reductions over ranks are on it."""
        first: torch.Tensor = next(p for group in self.inner.param_groups for p in group["params"])
        return first.device

    def gradients(self) -> list[torch.Tensor | None]:
        """The current gradient of each parameter."""
        return [p.grad for p in self.parameters()]

    def portion(self) -> list[bool]:
        """By parameter, whether this rank reads its reduced gradient for a norm that is summed over ranks."""
        return self.ranks.portion([p.numel() for p in self.parameters()])

    @property
    def batch_size(self) -> int | None:
        """Examples per step over all ranks, B: as given, else as last counted in the batches observed."""
        return self.counted_batch_size if self.global_batch_size is None else self.global_batch_size

    def observe(self, batch: Any) -> None:
        """Take the batch of a step or of one of its micro-steps; the same one may come again."""
        self.batch = batch
        length = batch_length(batch)
        self._observed, self._longest = self._observed + length, max(self._longest, length)

    def forget_batch(self) -> None:
        """The step is over."""
        self.batch = None
        self._observed = self._longest = 0

    @property
    def observed(self) -> float:
        """Examples of this step on this rank, for a sum over ranks; 0 where none were observed.

        At most as many as micro-steps explain: a batch of a step that a GradScaler skipped, or one that came twice,
        does not count.
        """
        parts = self.tap.parts
        return float(min(self._observed, parts * self._longest) if parts else self._longest)

    def count(self, examples: float) -> None:
        """Take that sum as the batch size; a smaller one only the second time: an epoch's last batch may be short."""
        if examples > 0:
            count = round(examples)
            self.counted_batch_size, self.last_count = max(count, self.last_count), count

    @property
    def batch_ratio(self) -> float | None:
        """B / b_small when both are known; never below 1."""
        small, large = self.thresholds.small_batch_size, self.batch_size
        return None if small is None or large is None else max(1.0, large / small)

    @property
    def may_probe(self) -> bool:
        """True when a second backward on the current batch is possible; the same on every rank."""
        return self.source != "parts" and self.model is not None and self.loss is not None and self.batch is not None

    def probe(self) -> tuple[list[torch.Tensor | None], float] | None:
        """Reduced gradient of a sub-batch and B / b of it; None when it would be the whole batch of any rank.

        The sub-batch is b_small over all ranks, or an eighth of the batch without a b_small. A few numbers are reduced
        first: all ranks skip the reduction of gradients if one rank's batch is too short for it.
        """
        if self.model is None or self.loss is None:
            return None
        local = batch_length(self.batch)
        wanted = self.thresholds.small_batch_size
        size = max(1, local // 8) if wanted is None else max(1, math.ceil(wanted / self.ranks.size))
        examples, sizes, too_short = self._over_ranks([self.observed, size, size >= local])
        if too_short:
            return None
        armed, self.tap.armed = self.tap.armed, False
        try:
            part = sub_batch(self.batch, size)
            gradients = probe_gradients(self.model, self.loss, part, self.parameters(), ranks=self.ranks)
        finally:
            self.tap.armed = armed
        return gradients, (self.global_batch_size or examples) / sizes

    def _over_ranks(self, numbers: list[float]) -> list[float]:
        """Their sums; with several ranks the host waits for the device here, with one it does not."""
        if self.ranks.size == 1:
            return numbers
        vector = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return [float(x) for x in self.ranks.sum_(vector).tolist()]
