"""What a page asks for: the store, and who is looking. The application has both; nothing is imported from `api`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from tula_service.store import Store
from tula_service.usecases.access import ANONYMOUS, Principal

__all__ = ["Here", "Visitor"]


@dataclass(frozen=True)
class Visitor:
    """A caller whom `api.deps.authenticate`, which stands before every guarded router, has let in."""

    store: Store
    principal: Principal

    @property
    def is_anonymous(self) -> bool:
        """True on loopback while no token exists."""
        return self.principal == ANONYMOUS


def _visitor(request: Request) -> Visitor:
    return Visitor(store=request.app.state.services.store, principal=request.scope["tula.principal"])


Here = Annotated[Visitor, Depends(_visitor)]
"""The visitor, as an endpoint's parameter."""
