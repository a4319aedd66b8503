"""Base class and number types of all models on the wire."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from tula_wire.bounds import MAX_COUNT, MAX_DURATION_S, MAX_USD_PER_HOUR
from tula_wire.text import UNPRINTABLE, printable

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]
Positive = Annotated[float, Field(gt=0, le=1e24)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=MAX_DURATION_S)]
UsdPerHour = Annotated[float, Field(ge=0, le=MAX_USD_PER_HOUR)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=rf"^[^{UNPRINTABLE}]+$")]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/@+-]{1,200}$")]
"""A name that may fill a placeholder of a command: to a shell it is one word, and nothing but a word."""
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,199}$")]
"""An id that the service gives: a file name and a word of a shell as it stands, and never `..`."""
Message = Annotated[str, AfterValidator(printable), Field(max_length=2000)]
"""A sentence, often of an exception: control characters in it are replaced, as refusing them would lose the report."""
Timestamp = AwareDatetime


class WireModel(BaseModel):
    """Base of all models. Rejects unknown fields, NaN and infinity; readers use `read`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, ser_json_inf_nan="null")


M = TypeVar("M", bound=BaseModel)


def optional(description: str) -> Any:
    """A field that is null unless it is given."""
    return Field(None, description=description)


def read(model: type[M], payload: bytes | str | dict[str, Any]) -> M:
    """Parse `payload` as a reader: ignores unknown fields, which a newer writer may send, and validates all others.

    Raises `pydantic.ValidationError` if a known field is wrong or missing.
    """
    if isinstance(payload, (bytes, str)):
        return model.model_validate_json(payload, extra="ignore")
    return model.model_validate(payload, extra="ignore")
