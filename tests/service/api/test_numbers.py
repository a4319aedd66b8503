"""Tests that NaN and infinity are refused in every number that the service accepts, at any depth."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import tula_wire
from tests.service.api.conftest import Service, Tenant
from tests.service.api.test_security import concrete
from tula_service.api.docs import document

Path = tuple[str, ...]


def numbers(kind: Any, at: Path = ()) -> Iterator[Path]:
    """Yield the path of every number inside a type, with "0" for an entry of a list and "x" for one of a mapping."""
    if kind in (float, int):
        yield at
    for name, inner in inside(kind):
        yield from numbers(inner, at if name is None else (*at, name))


def inside(kind: Any) -> list[tuple[str | None, Any]]:
    """Return (place, type) for each type inside a type; the place is None if both have the same place."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return [(None, inner[0])]
    if origin in (typing.Union, types.UnionType):
        return [(None, one) for one in inner]
    if origin is list:
        return [("0", inner[0])]
    if origin is dict:
        return [("x", inner[1])]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [(name, field.annotation) for name, field in kind.model_fields.items()]
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]
    return []


def holding(at: Path, value: str) -> str:
    """Return the smallest JSON body with this value in this place."""
    if not at:
        return value
    inner = holding(at[1:], value)
    return f"[{inner}]" if at[0] == "0" else f'{{"{at[0]}": {inner}}}'


def bodies(service: Service) -> dict[str, type[BaseModel]]:
    """Return the models of all request bodies by their names in the OpenAPI document."""
    found = {}
    for operations in document(service.app)["paths"].values():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rsplit("/", 1)[-1]
            if name:
                found[name] = getattr(tula_wire, name)
    return found


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_no_body_takes_nan_or_infinity_anywhere(service: Service, value: str) -> None:
    tried = 0
    for name, model in bodies(service).items():
        for at in numbers(model):
            with pytest.raises(ValidationError) as refused:
                model.model_validate_json(holding(at, value))
            faults = [error for error in refused.value.errors() if tuple(map(str, error["loc"]))[: len(at)] == at]
            assert {error["type"] for error in faults} == {"finite_number"}, (name, at, refused.value)
            tried += 1
    assert tried > 60


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_no_query_parameter_takes_nan_or_infinity(service: Service, red: Tenant, value: str) -> None:
    tried = 0
    with service.client(red.user) as client:
        for path, operations in document(service.app)["paths"].items():
            parameters = operations.get("get", {}).get("parameters", [])
            needed = {"column": "loss"} if any(each["name"] == "column" for each in parameters) else {}
            for parameter in parameters:
                schemas = [parameter["schema"], *parameter["schema"].get("anyOf", [])]
                schemas += [schema["items"] for schema in schemas if "items" in schema]
                if parameter["in"] != "query" or not {"number", "integer"} & {one.get("type") for one in schemas}:
                    continue
                asked = {**needed, parameter["name"]: value}
                answer = client.get(concrete(path, red), params=asked)
                assert answer.status_code == 422, (path, parameter["name"], answer.text)
                assert answer.json()["field"].startswith(parameter["name"])
                tried += 1
    assert tried > 10
