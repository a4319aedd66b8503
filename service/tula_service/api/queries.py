"""Defines code that endpoints share: a check for unknown parameters, list cursors, and the agents' lease header."""

from __future__ import annotations

from typing import Annotated, Any, Final, get_origin

from fastapi import Header, Query, Request
from pydantic import BaseModel

from tula_service.errors import InvalidInput
from tula_wire.bounds import MAX_COUNT
from tula_wire.samples import LEASE_HEADER

_MAX_NAME_LENGTH: Final = 64

Cursor = Annotated[
    str | None,
    Query(json_schema_extra={"pattern": r"^[0-9]{1,18}$"}, description="`next_cursor` of the previous page."),
]
"""The type of an endpoint's parameter for the position at which a page begins."""
Lease = Annotated[
    int | None,
    Header(
        alias=LEASE_HEADER,
        ge=0,
        le=MAX_COUNT,
        description="The `lease` under which the sender measures the run; 409 if it is not the run's current lease.",
    ),
]
"""The type of an endpoint's parameter for the lease number that an agent sends."""


async def reject_unknown_query(request: Request) -> None:
    """Raise InvalidInput for a query parameter that is repeated or not declared by the route.

    An undeclared parameter may be a misspelling.
    """
    declared: dict[str, Any] = {}
    for param in request.scope["route"].dependant.query_params:
        kind = param.field_info.annotation
        is_model = isinstance(kind, type) and issubclass(kind, BaseModel)  # each field of the model is a parameter
        declared |= {k: v.annotation for k, v in kind.model_fields.items()} if is_model else {param.alias: kind}
    for name in request.query_params:
        field = name[:_MAX_NAME_LENGTH]  # untrusted text is shortened and quoted
        if name not in declared:
            remedy = f"use {', '.join(declared)}" if declared else "omit it, since this route has no parameters"
            raise InvalidInput(f"There is no parameter {field!r}: {remedy}.", field=field)
        if get_origin(declared[name]) is not list and len(request.query_params.getlist(name)) > 1:
            raise InvalidInput(f"{field} is repeated: send only one value.", field=field)
