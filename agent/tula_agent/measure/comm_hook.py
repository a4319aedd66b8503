"""The gradient noise scale from DDP's one communication hook, for a script that asks for it and has none of its own."""

# Without `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.

import math
import time
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from tula_agent.guard import logger
from tula_agent.measure.gradients import MAX_COST_S
from tula_agent.measure.later import Later, to_number
from tula_agent.scaling.noise_math import NoiseAverage
from tula_agent.torch_private import ddp_models

__all__ = ["NoiseHook", "attach"]


class _Reduction:
    """One backward pass that is measured: squared norms of its buckets, before and after."""

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.launched_all = False
        self.local: list[torch.Tensor] = []
        self.reduced: list[torch.Tensor] = []


class NoiseHook:
    """All-reduces as DDP does without a hook and, on the first rank at some steps, compares norms before and after.

    This rank's |g|^2 before, with |mean of g|^2 over N ranks after, gives tr(Sigma) / |G|^2 (McCandlish et al. 2018,
    appendix A.1), averaged over measurements. One rank stands for all: no collective is added. Only the first backward
    of a step counts, since later ones may reduce what has been averaged already. Norms are read so seldom that they
    cost MAX_COST_S per step on the host.
    """

    def __init__(self, model: Any, measures: bool, step: Callable[[], int], examples: Callable[[], int]) -> None:
        self.group = model.process_group
        self.world_size = int(dist.get_world_size(self.group))
        self.interval = 1
        self._measures = measures
        self._step = step
        self._examples = examples
        self._seen_step = -1
        self._next_step = 0
        self._spent_s = 0.0
        self._average = NoiseAverage()
        self._now: _Reduction | None = None
        self._lock = Lock()
        self._results: deque[tuple[int, float | Later, float | Later]] = deque(maxlen=64)

    def before(self, buffer: torch.Tensor, first: bool, last: bool) -> _Reduction | None:
        """A bucket is about to be reduced; what it belongs to when it is measured. Never raises."""
        if not self._measures:
            return None
        try:
            if first:
                step = self._step()
                due = step != self._seen_step and step >= self._next_step
                self._seen_step = step
                self._spent_s = 0.0
                self._now = _Reduction(self._examples()) if due else None
            now = self._now
            if now is not None:
                started = time.perf_counter()
                now.local.append(_squared(buffer))
                now.launched_all = last
                self._spent_s += time.perf_counter() - started
            return now
        except Exception as error:
            self._give_up(error)
            return None

    def after(self, reduced: torch.Tensor, of: _Reduction) -> None:
        """It has been reduced. On whatever thread the reduction ended; never raises."""
        try:
            with self._lock:
                started = time.perf_counter()
                of.reduced.append(_squared(reduced))
                if of.launched_all and len(of.reduced) == len(of.local):
                    pair = to_number(torch.stack(of.local).sum()), to_number(torch.stack(of.reduced).sum())
                    self._results.append((of.examples, *pair))
                    self._spent_s += time.perf_counter() - started
                    self.interval = max(1, math.ceil(self._spent_s / MAX_COST_S))
                    self._next_step = self._seen_step + self.interval
                else:
                    self._spent_s += time.perf_counter() - started
        except Exception as error:
            self._give_up(error)

    def news(self) -> float | None:
        """tr(Sigma) / |G|^2 in examples, if there is a new measurement; infinite where no signal stands out."""
        answer = None
        while self._results:
            examples, local, reduced = self._results[0]
            if any(isinstance(number, Later) and not number.ready for number in (local, reduced)):
                break
            self._results.popleft()
            small, large = (number.value if isinstance(number, Later) else number for number in (local, reduced))
            if self._average.update(small, large, self.world_size):
                answer = self._average.noise_scale_over_batch * examples * self.world_size
        return answer

    def _give_up(self, error: Exception) -> None:
        self._measures = False
        logger.warning("the gradient noise scale failed and is left out, training goes on: %r", error)


def _squared(flat: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32)
    return norm.square()


def _reduce(state: NoiseHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    buffer = bucket.buffer()
    measured = state.before(buffer, bucket.index() == 0, bucket.is_last())
    # As DDP does while it copies gradients into the bucket; to divide would differ in the last bit. (It does divide
    # gradients that are kept in the bucket by `zero_grad(set_to_none=False)`: the same for two, four, eight ranks.)
    buffer.mul_(1.0 / state.world_size)
    future = dist.all_reduce(buffer, group=state.group, async_op=True).get_future()

    def done(ended: Any) -> torch.Tensor:
        reduced: torch.Tensor = ended.value()[0]
        if measured is not None:
            state.after(reduced, measured)
        return reduced

    hooked: torch.futures.Future[torch.Tensor] = future.then(done)
    return hooked


def attach(
    models: list[torch.nn.Module], measures: bool, step: Callable[[], int], examples: Callable[[], int]
) -> NoiseHook | None:
    """Take the hook of the one DDP model among `models`; None, and a word in the log, where that cannot be.

    measures: True on the rank that reports; the others reduce alike. step: the step under way; examples: of this rank
    in it so far. Once taken, a hook that the script registers later is refused by DDP.
    """
    found = ddp_models(models)
    if len(found) != 1 or dist.get_world_size(found[0].process_group) < 2:
        logger.warning("the communication hook needs one DDP model on two ranks or more: no gradient noise scale")
        return None
    model = found[0]
    if getattr(model, "_comm_hooks", None):
        logger.warning("the model has a communication hook already, which stays: no gradient noise scale")
        return None
    hook = NoiseHook(model, measures, step, examples)
    try:
        model.register_comm_hook(hook, _reduce)
    except RuntimeError as error:  # a built-in hook leaves no trace that Python could see
        logger.warning("DDP refused the communication hook: no gradient noise scale: %s", error)
        return None
    return hook
