"""Tracks how far training has progressed through its data, and saves and restores random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch

from tula_agent.guard import logger

T = TypeVar("T")


@dataclass
class Position:
    """Position of training: the number of complete epochs, and the number of batches consumed in the current epoch.

    `step` counts micro-steps from the start of training. `epochs_before` is the progress of earlier processes, measured
    in epochs because epochs do not depend on the batch size; `known` is True once the script or `resume` has set
    `epochs_before`. `resumable`: True if the script calls `resume`, so that the random state must be read.
    `at_epoch_start`: the random state at the start of the current epoch. `pending`: what is needed to continue an
    interrupted epoch (the number of batches to skip, the random state at the start of the epoch, and the random state
    after the skipped batches).
    """

    epoch: int = 0
    consumed: int = 0
    step: int = 0
    epochs_before: float = 0.0
    known: bool = False
    resumable: bool = False
    at_epoch_start: dict[str, Any] = field(default_factory=dict)
    loader: Any = None
    pending: tuple[int, dict[str, Any], dict[str, Any] | None] | None = None

    def begin(self, loader: Iterable[T]) -> Iterator[T]:
        """Return an iterator over `loader` that starts at the current position."""
        pending, self.pending, self.loader = self.pending, None, loader
        if pending is None:
            self.at_epoch_start, self.consumed = _captured(loader) if self.resumable else {}, 0
            return iter(loader)
        consumed, self.at_epoch_start, now = pending
        if self.at_epoch_start and now is not None:
            restore_randomness(self.at_epoch_start, loader)
        batches = iter(loader)
        self.consumed = sum(1 for _ in islice(batches, consumed))
        self.known = True
        self.epochs_before = self.epoch + _share(self.consumed, loader)
        if now is not None:
            restore_randomness(now, loader)
        return batches

    def end(self) -> None:
        """End the epoch, which may have been left early."""
        self.epoch += 1
        self.consumed, self.at_epoch_start = 0, {}


def _captured(loader: Any) -> dict[str, Any]:
    """Return the captured random state, or an empty dictionary if a generator cannot be read.

    An unreadable generator may make `checkpoint` fail, but must not stop training.
    """
    try:
        return capture_randomness(loader)
    except Exception as error:
        logger.info("the random state cannot be read, so a resumed run may draw different random numbers: %r", error)
        return {}


def _share(batches: int, loader: Iterable[Any]) -> float:
    """Return a number of batches as a fraction of an epoch; 0 if the loader has no length."""
    try:
        return min(1.0, batches / len(loader))  # type: ignore[arg-type]
    except Exception:  # a loader's own __len__ may raise anything
        return 0.0


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the distinct generators of the loader and its samplers, which often share the loader's generator."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    generators = [getattr(holder, "generator", None) for holder in holders]
    unique = {id(generator): generator for generator in generators if isinstance(generator, torch.Generator)}
    return list(unique.values())


def capture_randomness(loader: Any = None) -> dict[str, Any]:
    """Return the state of every generator that a step may use: those of torch (CPU, CUDA), NumPy, Python and the
    loader.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        generator = numpy.random.get_state(legacy=False)
        if generator["bit_generator"] == "MT19937":  # unless a script has replaced it
            keys, position = generator["state"]["key"], generator["state"]["pos"]
            gauss = int(generator["has_gauss"]), float(generator["gauss"])
            state["numpy"] = ["MT19937", keys.tolist(), int(position), *gauss]
    state["loader"] = [generator.get_state() for generator in _generators(loader)]
    return state


def restore_randomness(state: dict[str, Any], loader: Any = None) -> None:
    """Restore the states from `capture_randomness`; skip generators that do not exist in this process."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    for generator, saved in zip(_generators(loader), state["loader"], strict=False):
        generator.set_state(saved)
