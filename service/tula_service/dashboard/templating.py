"""Jinja templates with everything escaped, and the filters that show numbers."""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tula_service.dashboard.format import FILTERS


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tula_service.dashboard", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    return environment


def render(name: str, **context: Any) -> str:
    """A page. Raises jinja2.UndefinedError when a template asks for what it was not given."""
    return _environment().get_template(name).render(**context)
