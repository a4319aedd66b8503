"""Parts that endpoints share: the refusal of unknown parameters, the cursor of lists, and the lease of agents."""

from __future__ import annotations

from typing import Annotated, Any, Final, get_origin

from fastapi import Header, Query, Request
from pydantic import BaseModel

from tula_service.errors import InvalidInput
from tula_wire.bounds import MAX_COUNT
from tula_wire.samples import LEASE_HEADER

_MAX_NAME_LENGTH: Final = 64

Cursor = Annotated[
    str | None, Query(json_schema_extra={"pattern": r"^[0-9]{1,18}$"}, description="`next_cursor` of the page before.")
]
"""The position at which a page of a list begins, as an endpoint's parameter."""
Lease = Annotated[
    int | None,
    Header(
        alias=LEASE_HEADER,
        ge=0,
        le=MAX_COUNT,
        description="The `lease` of the run under which the sender measures; another than the run's is 409.",
    ),
]
"""The lease of an agent's request, as an endpoint's parameter."""


async def reject_unknown_query(request: Request) -> None:
    """Refuse a query parameter that the route does not declare (it may be a misspelling) or that is given twice."""
    declared: dict[str, Any] = {}
    for param in request.scope["route"].dependant.query_params:
        kind = param.field_info.annotation
        is_model = isinstance(kind, type) and issubclass(kind, BaseModel)  # each of whose fields is a parameter
        declared |= {k: v.annotation for k, v in kind.model_fields.items()} if is_model else {param.alias: kind}
    for name in request.query_params:
        field = name[:_MAX_NAME_LENGTH]  # unchecked text from outside: shortened, and quoted as data
        if name not in declared:
            remedy = f"use {', '.join(declared)}" if declared else "leave it out, this takes none"
            raise InvalidInput(f"There is no parameter {field!r}: {remedy}.", field=field)
        if get_origin(declared[name]) is not list and len(request.query_params.getlist(name)) > 1:
            raise InvalidInput(f"{field} is given more than once: give one value.", field=field)
