"""Dependency of pages: the store and the user, read from the application, because `dashboard` never imports `api`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from tula_service.store import Store
from tula_service.usecases.access import ANONYMOUS, Principal


@dataclass(frozen=True)
class User:
    """A caller whom `api.deps.authenticate` has authenticated; it guards every router but login and static files."""

    store: Store
    principal: Principal

    @property
    def is_anonymous(self) -> bool:
        """True on loopback while no token exists."""
        return self.principal == ANONYMOUS


def _user(request: Request) -> User:
    return User(store=request.app.state.services.store, principal=request.scope["tula.principal"])


CurrentUser = Annotated[User, Depends(_user)]
"""The user, as an endpoint's parameter."""
