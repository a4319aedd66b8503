"""The next smaller configuration after an out-of-memory, and what it does to the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt

from tula_wire import Configuration

__all__ = ["Fallback", "next_smaller"]


@dataclass(frozen=True)
class Fallback:
    """What to run instead, and a sentence that says so."""

    configuration: Configuration
    same_global_batch: bool
    explanation: str


def next_smaller(
    failed: Configuration,
    *,
    can_accumulate: bool,
    max_local_batch_size: int | None = None,
    min_local_batch_size: int = 1,
) -> Fallback | None:
    """What to try after `failed` ran out of memory; None when nothing smaller is left.

    First the same global batch B from a smaller local batch b and more accumulation (b * accumulation constant), the
    largest such b below the failed one and at most `max_local_batch_size` (the memory model's bound after it has
    learnt of the failure); without a way to accumulate, the same nodes with half the local batch, hence a smaller B.
    """
    bound = min(failed.local_batch_size - 1, max_local_batch_size or failed.local_batch_size)
    if can_accumulate:
        per_rank = failed.local_batch_size * failed.grad_accum_steps
        for local in _divisors_below(per_rank, bound):
            if local >= min_local_batch_size:
                smaller = replace(failed, local_batch_size=local, grad_accum_steps=per_rank // local)
                return Fallback(smaller, True, _same(failed, smaller))
    local = failed.local_batch_size // 2
    while local > bound:
        local //= 2
    if local < max(1, min_local_batch_size):
        return None
    smaller = replace(failed, local_batch_size=local)
    return Fallback(smaller, False, _smaller(failed, smaller))


def _divisors_below(number: int, bound: int) -> Iterator[int]:
    """Divisors of `number` from `bound` down, but not below a quarter of it: smaller ones waste the accelerator."""
    return (d for d in range(bound, max(1, bound // 4) - 1, -1) if number % d == 0)


def _same(failed: Configuration, smaller: Configuration) -> str:
    return (
        f"Out of memory at a local batch of {failed.local_batch_size}: going on with {smaller.local_batch_size} and "
        f"{smaller.grad_accum_steps} accumulation steps. The global batch stays {smaller.global_batch_size}, so the "
        "learning rate stays as it is; a step takes longer."
    )


def _smaller(failed: Configuration, smaller: Configuration) -> str:
    ratio = smaller.global_batch_size / failed.global_batch_size
    return (
        f"Out of memory at a local batch of {failed.local_batch_size}: going on with {smaller.local_batch_size}. The "
        f"global batch falls from {failed.global_batch_size} to {smaller.global_batch_size}, so a learning rate that "
        f"was set for the larger batch should be multiplied by {ratio:g} (SGD, linear rule) or {sqrt(ratio):.3g} "
        "(Adam, square root rule)."
    )
