"""A failure on one rank becomes the same error on all: otherwise the others wait until the backend's timeout.

`tula_agent.rank_channel` compares this with the other two ways in which ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")

_LONGEST: Final = 2000  # characters of an error that are sent to the other ranks


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The agent raises this one into training, since training depends on it."""


class CollectiveCalls:
    """Calls that every rank training `model` makes in the same order, and that succeed or fail on all of them.

    Each method raises `CheckpointError` on all ranks with one sentence, "`what` (rank, error): `remedy`", that of the
    first rank that failed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if distributed else 0
        self.size: int = dist.get_world_size() if distributed else 1
        # NCCL moves objects over the current device, which a script may have left at the first one on every rank.
        self._device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)

    def on_each(self, function: Callable[[], T], what: str, remedy: str) -> T:
        """Call `function` on every rank; returns its result on this one."""
        value, error, cause = self._try(function, what, remedy)
        errors = [error]
        if self.size > 1:
            errors = [None] * self.size
            with self._on_device():
                dist.all_gather_object(errors, error)
        _raise(next((sentence for sentence in errors if sentence is not None), None), cause)
        return cast(T, value)

    def on_first(self, function: Callable[[], T], what: str, remedy: str) -> T:
        """Call `function` on the first rank only; returns its result on every rank (pickled, so keep it small)."""
        value, error, cause = self._try(function, what, remedy) if self.rank == 0 else (None, None, None)
        outcome: list[Any] = [value, error]
        if self.size > 1:
            with self._on_device():
                dist.broadcast_object_list(outcome, src=0)
        _raise(outcome[1], cause)
        return cast(T, outcome[0])

    def _try(self, function: Callable[[], T], what: str, remedy: str) -> tuple[T | None, str | None, Exception | None]:
        try:
            return function(), None, None
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
