"""Defines the base class and field types that all wire models share."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    Strict,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, core_schema

from tula_wire.bounds import MAX_COUNT, MAX_DURATION_S, MAX_USD_PER_HOUR
from tula_wire.text import UNPRINTABLE, printable

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]
Positive = Annotated[float, Field(gt=0, le=1e24)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=MAX_DURATION_S)]
UsdPerHour = Annotated[float, Strict(), Field(ge=0, le=MAX_USD_PER_HOUR)]
"""A price; a string that contains a number is rejected, since a price in quotes is probably a mistake."""
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=rf"^[^{UNPRINTABLE}]+$")]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/@+-]{1,200}$")]
"""A name that may replace a placeholder in a command, since a shell reads it as a single plain word."""
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,199}$")]
"""An id that the service assigns; it can be used unchanged as a file name or a shell word, and is never `..`."""
Message = Annotated[str, AfterValidator(printable), Field(max_length=2000)]
"""A sentence, often from an exception; control characters are replaced so that the text need not be rejected."""
Timestamp = AwareDatetime


def _open(part: Any) -> Any:
    """Return the schema with which readers accept unknown literal values, since later versions may add values."""
    if isinstance(part, list):
        return [_open(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "literal":
        return core_schema.with_info_wrap_validator_function(_known_word, part)
    return {name: inner if name == "metadata" else _open(inner) for name, inner in part.items()}


def _known_word(value: Any, parse: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    is_reader = bool(info.context and info.context.get("reader"))
    return value if is_reader and isinstance(value, str) else parse(value)


class WireModel(BaseModel):
    """Base class of all wire models; it rejects NaN, infinity and, unless parsed with `read`, unknown fields."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, ser_json_inf_nan="null")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the model's schema, with which `read` accepts literal values from later versions."""
        schema: CoreSchema = _open(handler(source))
        return schema


M = TypeVar("M", bound=BaseModel)


def optional(description: str) -> Any:
    """Return a field with this description whose default is null."""
    return Field(None, description=description)


def read(model: type[M], payload: bytes | str | dict[str, Any]) -> M:
    """Parse `payload`, ignoring unknown fields and accepting unknown literal values, which a newer version may send.

    Raises `pydantic.ValidationError` if a known field is invalid or missing.
    """
    if isinstance(payload, (bytes, str)):
        return model.model_validate_json(payload, extra="ignore", context={"reader": True})
    return model.model_validate(payload, extra="ignore", context={"reader": True})
