"""The models and optimizers that a script has shown to the agent, for as long as the script itself keeps them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tula_agent.weakly import Weakly

__all__ = ["Watched"]


class Watched:
    """What `run.watch` was given, over all its calls; what the script lets go is gone from here too.

    observers: optimizers that probe with the batch. tellers: those that say what they did (gradient scaling).
    """

    def __init__(self) -> None:
        self.models: Weakly[torch.nn.Module] = Weakly()
        self.optimizers: Weakly[Any] = Weakly()
        self.observers: Weakly[Any] = Weakly()
        self.tellers: Weakly[Any] = Weakly()
        self._said: weakref.WeakKeyDictionary[Any, dict[str, float]] = weakref.WeakKeyDictionary()

    def add(self, models: Iterable[Any], optimizers: Iterable[Any]) -> list[Any]:
        """Take these in; returns the optimizers that were not known yet."""
        for model in models:
            if isinstance(model, torch.nn.Module):
                self.models.add(model)
        new = [optimizer for optimizer in optimizers if self.optimizers.add(optimizer)]
        for optimizer in new:
            if hasattr(optimizer, "observe_batch"):
                self.observers.add(optimizer)
            if hasattr(optimizer, "telemetry"):
                self.tellers.add(optimizer)
        return new

    def news(self) -> Iterator[tuple[str, float]]:
        """What gradient scaling did, where it changed: name and value."""
        for optimizer in self.tellers:
            said = self._said.setdefault(optimizer, {})
            for name, value in optimizer.telemetry().items():
                if said.get(name) != value and name != "step":
                    said[name] = value
                    yield name, value

    def show(self, batch: Any, times: int = 1) -> None:
        """Let the observers see the batch of a micro-step; of `times` of them that are alike."""
        for optimizer in self.observers:
            for _ in range(times):
                optimizer.observe_batch(batch)

    def forget(self) -> None:
        """Know of nothing any more."""
        self.models.clear()
        self.optimizers.clear()
        self.observers.clear()
        self.tellers.clear()
        self._said.clear()
