"""References to what belongs to the script: weak ones, since a model that we kept would keep its process group open."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class WeakList(Generic[T]):
    """Objects in the order of their arrival, each once, while the script keeps them."""

    def __init__(self, objects: Iterable[T] = ()) -> None:
        self.references: list[Callable[[], T | None]] = []  # public: the hot path tests it for emptiness without a call
        for item in objects:
            self.add(item)

    def add(self, item: T) -> bool:
        """False where `item` is held already. What has no weak references (a class with slots) is held strongly."""
        if any(known is item for known in self):
            return False
        try:
            self.references.append(weakref.ref(item))
        except TypeError:
            self.references.append(lambda: item)
        return True

    def __iter__(self) -> Iterator[T]:
        for reference in self.references:
            item = reference()
            if item is not None:
                yield item

    @property
    def first(self) -> T | None:
        """The oldest that still exists."""
        return next(iter(self), None)


class TrackedObjects:
    """The models and optimizers given to `run.watch`, over all its calls.

    scaled: the optimizers that scale gradients (`TulaOptimizer`), which want each batch and report numbers.
    """

    def __init__(self) -> None:
        self.models: WeakList[torch.nn.Module] = WeakList()
        self.optimizers: WeakList[Any] = WeakList()
        self.scaled: WeakList[Any] = WeakList()
        self._reported: weakref.WeakKeyDictionary[Any, dict[str, float]] = weakref.WeakKeyDictionary()

    def add(self, models: Iterable[Any], optimizers: Iterable[Any]) -> list[Any]:
        """Track these; returns the optimizers that are new."""
        for model in models:
            if isinstance(model, torch.nn.Module):
                self.models.add(model)
        new = [optimizer for optimizer in optimizers if self.optimizers.add(optimizer)]
        for optimizer in new:
            if hasattr(optimizer, "observe_batch"):
                self.scaled.add(optimizer)
        return new

    def changed_values(self) -> Iterator[tuple[str, float]]:
        """Name and value of each reported number that differs from the last time."""
        for optimizer in self.scaled:
            reported = self._reported.setdefault(optimizer, {})
            for name, value in optimizer.telemetry().items():
                if reported.get(name) != value and name != "step":
                    reported[name] = value
                    yield name, value

    def observe_batch(self, batch: Any, share: float, times: int = 1) -> None:
        """Hand the batch of a micro-step, a `share` of the loader's, to those that scale; `times`: of how many such."""
        for optimizer in self.scaled:
            for _ in range(times):
                optimizer.observe_batch(batch, share=share)
