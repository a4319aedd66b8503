"""Base class and number types of all models on the wire."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]
Positive = Annotated[float, Field(gt=0, le=1e24)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Timestamp = AwareDatetime


class WireModel(BaseModel):
    """Base of all models. Rejects unknown fields, NaN and infinity; readers use `read`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, ser_json_inf_nan="null")


M = TypeVar("M", bound=BaseModel)


def read(model: type[M], payload: bytes | str | dict[str, Any]) -> M:
    """Parse `payload` as a reader: ignores unknown fields, which a newer writer may send, and validates all others.

    Raises `pydantic.ValidationError` if a known field is wrong or missing.
    """
    if isinstance(payload, (bytes, str)):
        return model.model_validate_json(payload, extra="ignore")
    return model.model_validate(payload, extra="ignore")
