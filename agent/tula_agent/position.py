"""Where a training is in its data, and its random numbers: with both, a resumed run is bit for bit the same run."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from tula_agent.guard import logger

T = TypeVar("T")


def capture_randomness(loader: Any = None) -> dict[str, Any]:
    """The state of every generator that a step may draw from: torch (CPU, CUDA), NumPy, Python, the loader's own."""
    version, words, gauss_next = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, *words, gauss_next]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found = numpy.random.get_state(legacy=False)
        if found["bit_generator"] == "MT19937":  # unless a script has replaced it
            keys, position = found["state"]["key"], found["state"]["pos"]
            gauss = int(found["has_gauss"]), float(found["gauss"])
            state["numpy"] = ["MT19937", [int(key) for key in keys], int(position), *gauss]
    state["loader"] = [generator.get_state() for generator in _generators(loader)]
    return state


def restore_randomness(state: dict[str, Any], loader: Any = None) -> None:
    """Restore what `capture_randomness` captured; generators that do not exist in this process are left out."""
    torch.set_rng_state(state["torch"])
    version, *words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    for generator, saved in zip(_generators(loader), state["loader"], strict=False):
        generator.set_state(saved)


@dataclass
class Position:
    """Epochs that are complete, and batches consumed of the one under way.

    `step` counts micro-steps from the start of training. `epochs_before` is the progress of earlier processes in
    epochs, which do not depend on the batch size; `known` is True once the script or `resume` has set it.
    `at_epoch_start`: the random state when the epoch under way began.
    """

    epoch: int = 0
    consumed: int = 0
    step: int = 0
    epochs_before: float = 0.0
    known: bool = False
    at_epoch_start: dict[str, Any] = field(default_factory=dict)
    loader: Any = None
    _pending: tuple[int, dict[str, Any], dict[str, Any] | None] | None = None

    def restore(self, consumed: int, at_epoch_start: dict[str, Any], now: dict[str, Any] | None) -> None:
        """Let the next epoch begin as the interrupted one did, skip `consumed` batches, and use state `now`."""
        self._pending = (consumed, at_epoch_start, now)

    def begin(self, loader: Iterable[T]) -> Iterator[T]:
        """An iterator over `loader` from the current position."""
        pending, self._pending, self.loader = self._pending, None, loader
        if pending is None:
            self.at_epoch_start, self.consumed = _captured(loader), 0
            return iter(loader)
        consumed, at_epoch_start, now = pending
        self.at_epoch_start, self.consumed = at_epoch_start, 0
        if at_epoch_start and now is not None:
            restore_randomness(at_epoch_start, loader)
        batches = iter(loader)
        for _ in range(consumed):
            if next(batches, _END) is _END:
                break
            self.consumed += 1
        self.known = True
        self.epochs_before = self.epoch + _share(self.consumed, loader)
        if now is not None:
            restore_randomness(now, loader)
        return batches

    def advance(self) -> None:
        """The script gets a batch."""
        self.consumed += 1
        self.step += 1

    def end(self) -> None:
        """The epoch is over, or was left."""
        self.epoch += 1
        self.consumed, self.at_epoch_start = 0, {}


_END: Any = object()


def _captured(loader: Any) -> dict[str, Any]:
    """Empty where a generator cannot be read: only writing a checkpoint may fail for that."""
    try:
        return capture_randomness(loader)
    except Exception as error:
        logger.info("random numbers cannot be read, so a resumed run may draw others: %r", error)
        return {}


def _share(batches: int, loader: Iterable[Any]) -> float:
    """So many batches as a share of an epoch; 0 for a loader without a length."""
    try:
        return min(1.0, batches / len(loader))  # type: ignore[arg-type]
    except Exception:  # a loader's own __len__ may raise anything
        return 0.0


def _generators(loader: Any) -> list[torch.Generator]:
    """The loader's own generators; samplers often share the loader's."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    return list(unique.values())
