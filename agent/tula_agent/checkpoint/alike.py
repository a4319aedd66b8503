"""What one rank fails at fails on all of them: the others would wait for that one until the backend's timeout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist

__all__ = ["Alike", "CheckpointError"]

T = TypeVar("T")

_LONGEST: Final = 2000  # characters of an error that travel to the other ranks


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; unlike measuring, this is the training's own business and does raise."""


class Alike:
    """The ranks that train `model`; every rank must call the same methods in the same order.

    Each method raises `CheckpointError` on all ranks with one sentence, "`what` (rank, error): `remedy`", that of the
    first rank that failed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        there = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if there else 0
        self.size: int = dist.get_world_size() if there else 1
        # NCCL moves objects over the current device, which a script may have left at the first one on every rank.
        self._device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)

    def each(self, part: Callable[[], T], what: str, remedy: str) -> T:
        """Do `part` on every rank; what it gave on this one."""
        value, said, cause = self._try(part, what, remedy)
        sentences = [said]
        if self.size > 1:
            sentences = [None] * self.size
            with self._on_device():
                dist.all_gather_object(sentences, said)
        _raise(next((sentence for sentence in sentences if sentence is not None), None), cause)
        return cast(T, value)

    def first(self, part: Callable[[], T], what: str, remedy: str) -> T:
        """Do `part` on the first rank only; what it gave there, on every rank (pickled, so keep it small)."""
        value, said, cause = self._try(part, what, remedy) if self.rank == 0 else (None, None, None)
        told: list[Any] = [value, said]
        if self.size > 1:
            with self._on_device():
                dist.broadcast_object_list(told, src=0)
        _raise(told[1], cause)
        return cast(T, told[0])

    def _try(self, part: Callable[[], T], what: str, remedy: str) -> tuple[T | None, str | None, Exception | None]:
        try:
            return part(), None, None
        except CheckpointError as error:
            return None, str(error), error  # a sentence already
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}"[:_LONGEST].split())
            who = f"rank {self.rank}: " if self.size > 1 else ""
            return None, f"{what} ({who}{text}): {remedy}", error

    def _on_device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._device is None else torch.cuda.device(self._device)


def _raise(sentence: str | None, cause: Exception | None) -> None:
    if sentence is not None:
        raise CheckpointError(sentence) from cause
