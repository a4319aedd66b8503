"""Requests and answers as values of bytes and strings, without I/O; `_transport` sends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

T = TypeVar("T")
Method = Literal["GET", "POST", "PATCH", "DELETE"]
Query = Mapping[str, "str | float | Sequence[int] | Sequence[str] | None"]

JSON: Final = "application/json"
IDEMPOTENT: Final = frozenset({"GET", "DELETE", "PATCH"})
"""Methods that are idempotent; PATCH is, because it sets absolute values."""


@dataclass(frozen=True)
class Request:
    """A request, ready to send."""

    method: Method
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotent: bool = True


@dataclass(frozen=True)
class Answer:
    """An answer; header names are read in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request and the parser of its answer; `parse` raises `TulaError` if the answer is no success."""

    request: Request
    parse: Callable[[Answer], T]


def build(
    method: Method,
    path: str,
    *,
    query: Query | None = None,
    body: BaseModel | None = None,
    headers: Mapping[str, str] | None = None,
    idempotent: bool | None = None,
) -> Request:
    """A request; omits query values that are None and fields of `body` that were not set."""
    content = None if body is None else body.model_dump_json(exclude_unset=True).encode()
    sent = {"Accept": JSON, **({} if content is None else {"Content-Type": JSON}), **(headers or {})}
    repeatable = method in IDEMPOTENT if idempotent is None else idempotent
    return Request(method, path, tuple(_pairs(query or {})), content, sent, repeatable)


def _pairs(query: Query) -> list[tuple[str, str]]:
    pairs = []
    for name, value in query.items():
        if value is None:
            continue
        many = value if not isinstance(value, (str, int, float)) else [value]
        pairs += [(name, str(one)) for one in many]
    return pairs


def fill(route: str, **names: str) -> str:
    """Fill the placeholders of a route; each value, whatever it holds, stays one path segment."""
    for name, value in names.items():
        if value in ("", ".", ".."):
            raise ValueError(f"{name} must name something, not {value!r}")
    return route.format(**{name: quote(value, safe="") for name, value in names.items()})
