"""What belongs to the job is held weakly: a model that we kept would keep its process group, and with it the store."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["Weakly"]

T = TypeVar("T")


class Weakly(Generic[T]):
    """Things in the order they came, each once, for as long as the job itself keeps them."""

    def __init__(self, things: Iterable[T] = ()) -> None:
        self.references: list[Callable[[], T | None]] = []  # empty: there was nothing, which costs no call to ask
        for thing in things:
            self.add(thing)

    def add(self, thing: T) -> bool:
        """False where `thing` is held already. What Python cannot hold weakly is held."""
        if any(known is thing for known in self):
            return False
        try:
            self.references.append(weakref.ref(thing))
        except TypeError:
            self.references.append(lambda: thing)
        return True

    def __iter__(self) -> Iterator[T]:
        for reference in self.references:
            thing = reference()
            if thing is not None:
                yield thing

    def __bool__(self) -> bool:
        return self.first is not None

    @property
    def first(self) -> T | None:
        """The one that came first of those that are left."""
        return next(iter(self), None)

    def clear(self) -> None:
        """Hold nothing any more."""
        self.references = []
