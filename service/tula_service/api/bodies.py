"""Reads bodies: JSON or packed columns, plain or gzip, with limits before and after decompression."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgpack
from anyio import to_thread
from fastapi import Depends, Request
from pydantic import BaseModel

from tula_service.api.deps import Services, lane_of
from tula_service.errors import InvalidInput, TooLarge, UnsupportedMedia
from tula_wire import MAX_STEPS, SampleBatch, TelemetryChunk

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"

MAX_VALUES: Final[dict[type[BaseModel], int]] = {SampleBatch: 11 * MAX_STEPS, TelemetryChunk: 66 * MAX_STEPS}
"""Numbers and strings in one body of measurements: 9 full columns with a timeline; the steps and 64 full columns. A
parsed value takes many times its encoded bytes: with a limit on bytes alone, a small body of many small values would
take gigabytes."""
MAX_LIST: Final = 2 * MAX_STEPS
"""Values in one list, twice what a column may have: one a little too long is refused by its name."""
VALUE_BYTES: Final = 26
"""Of the longest number in JSON, with its comma. A body has at most these for each value after decompression."""
MAX_MEMBERS: Final = 500
"""Named members in one body, and lists and maps: no model has a fifth of it. Each unknown member is an error that names
it, and each list an object, so that these cost far more than a number in a column."""
MAX_TEXT_BYTES: Final = 64 * 1024
"""Of one text; the longest that a model takes has 200 characters."""
ORDINARY_BYTES: Final = 256 * 1024
ORDINARY_MEMBERS: Final = 2_000
"""Limits of bodies other than measurements: people write those, in a few hundred bytes."""

_PACKED_MAPS: Final = 2
"""The members of a chunk, and its columns."""

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Body:
    """A body as sent, with its media type and content encoding."""

    content_type: str
    encoding: str
    sent: bytes

    def plain(self, limit: int) -> bytes:
        """The body without compression; never holds more than `limit` bytes. Raises TooLarge or InvalidInput."""
        plain, is_whole = self.sent, True
        if self.encoding == "gzip":
            stream = zlib.decompressobj(wbits=31)
            try:
                plain = stream.decompress(self.sent, limit + 1)
                is_whole = stream.eof and not stream.unused_data
            except zlib.error:
                plain, is_whole = b"", False
        if len(plain) > limit:
            raise too_large(limit, "after decompression")
        if not is_whole:
            raise InvalidInput("The body is not one whole gzip stream: compress it again.", field="body")
        return plain


async def read_body(request: Request) -> Body:
    """The body, which has arrived, after a check of media type and encoding.

    Does not decompress or parse it: the endpoint does both in a thread, because they take time.
    """
    headers = request.headers
    content_type = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if content_type not in (JSON, MSGPACK):
        raise UnsupportedMedia(f"Content-Type {content_type!r} is not supported: send {JSON} or {MSGPACK}.")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise UnsupportedMedia(f"Content-Encoding {encoding!r} is not supported: send gzip or none.")
    return Body(content_type, encoding, await request.body())


def json_of(model: type[M]) -> Any:
    """The body as this model, as an endpoint's parameter: `Annotated[Model, json_of(Model)]`.

    A thread parses it: of agents' requests one of theirs. Raises pydantic.ValidationError, UnsupportedMedia.
    """

    async def read(request: Request) -> M:
        services: Services = request.app.state.services
        threads = None if lane_of(request.method, request.scope["path"]) == "others" else services.intake
        body = await read_body(request)
        if (body.content_type, body.encoding) != (JSON, "identity"):
            raise UnsupportedMedia(f"Only samples and telemetry may be packed or compressed: send plain {JSON}.")
        return await to_thread.run_sync(model.model_validate_json, body.sent, limiter=threads)

    return Depends(read)


def check_ordinary(sent: bytes) -> None:
    """Raise TooLarge for more members and values than people write, before anything is built of them."""
    if max(sent.count(mark) for mark in (b":", b",", b".", b"[", b"{", b"=")) > ORDINARY_MEMBERS:
        raise _too_many(ORDINARY_MEMBERS, "members")


def parse(model: type[M], body: Body) -> M:
    """The measurements in a body. Raises pydantic.ValidationError and ServiceError."""
    if body.content_type != JSON:
        raise UnsupportedMedia(f"Only telemetry may be {MSGPACK}: send {JSON}.")
    plain = body.plain(VALUE_BYTES * MAX_VALUES[model])
    _check_json(plain, MAX_VALUES[model])
    return model.model_validate_json(plain)


def _check_json(plain: bytes, max_values: int) -> None:
    """Raise TooLarge for more members, lists, maps or values than the model has, before anything is built of them."""
    if max(plain.count(mark) for mark in (b":", b"[", b"]", b"{")) > MAX_MEMBERS or plain.count(b'"') > 4 * MAX_MEMBERS:
        raise _too_many(MAX_MEMBERS, "members")
    _check_texts(plain)
    values = begin = 0
    while begin <= len(plain):
        end = plain.find(b"]", begin) % (len(plain) + 1)  # of the last part: the end of all, which -1 becomes
        in_list = plain.count(b",", begin, end)
        if in_list > MAX_LIST:
            raise _too_many(MAX_LIST, "values in one list")
        values, begin = values + in_list, end + 1
    if values > max_values:
        raise _too_many(max_values, "values")


def _check_texts(plain: bytes) -> None:
    """Raise TooLarge for a long text in JSON: Pydantic copies it five times before it refuses it."""
    begin = end = plain.find(b'"')
    while end >= 0:
        end = plain.find(b'"', end + 1)
        if (end if end >= 0 else len(plain)) - begin > MAX_TEXT_BYTES:
            raise _too_many(MAX_TEXT_BYTES, "bytes in one text")
        text = plain[begin + 1 : end]
        if (len(text) - len(text.rstrip(b"\\"))) % 2 == 0:  # else the mark is escaped, and the text not at its end
            begin = end = plain.find(b'"', end + 1) if end >= 0 else -1


def unpack(body: Body) -> Any:
    """MessagePack of packed columns as Python objects: two maps, of numbers and byte strings, and no list.

    Raises InvalidInput, TooLarge.
    """
    plain = body.plain(VALUE_BYTES * MAX_VALUES[TelemetryChunk])
    maps = 0

    def counted(members: dict[str, Any]) -> dict[str, Any]:
        nonlocal maps
        maps += 1
        if maps > _PACKED_MAPS:
            raise ValueError("a map too many")
        return members

    try:
        return msgpack.unpackb(
            plain,
            raw=False,
            strict_map_key=True,
            max_ext_len=0,
            max_str_len=MAX_TEXT_BYTES,
            max_array_len=0,
            max_map_len=MAX_MEMBERS,
            object_hook=counted,
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInput(
            "The body is not valid MessagePack with packed arrays: check how it is packed.", field="body"
        ) from error


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a body that is read by `read_body`, as JSON, the one type that generators know."""
    content = {JSON: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def too_large(limit: int, when: str) -> TooLarge:
    """The refusal of a body beyond this many bytes."""
    return TooLarge(f"The body is larger than {limit} bytes {when}: send smaller batches.")


def _too_many(limit: int, kind: str) -> TooLarge:
    return TooLarge(f"The body holds more than {limit} {kind}: send smaller batches.")
