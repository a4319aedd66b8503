"""Reads bodies: JSON or MessagePack, plain, gzip or zstd, with limits before and after decompression."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgpack
import zstandard
from fastapi import Request
from pydantic import BaseModel

from tula_service.errors import InvalidInput, TooLarge, UnsupportedMedia
from tula_service.settings import Settings
from tula_wire import MAX_STEPS

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
_MSGPACK_NAMES: Final = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})

MAX_DECOMPRESSED_BYTES: Final = 32 * 2**20
MAX_VALUES: Final = 66 * MAX_STEPS
"""Numbers and strings in one body: the steps and 64 columns of a full chunk. A parsed value takes many times its
encoded bytes: with a limit on bytes alone, a small body of many small values would take gigabytes."""
MAX_MEMBERS: Final = 500
"""Named members in one body, and lists and maps: no model has a fifth of it. Each unknown member is an error that names
it, and each list an object, so that these cost far more than a number in a column."""

_ZSTD_WINDOW: Final = 8 * 2**20  # RFC 9659: the most that an encoder may ask for; a decoder reserves it

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Body:
    """A body as sent, with its media type and content encoding."""

    content_type: str
    encoding: str
    sent: bytes

    def plain(self) -> bytes:
        """The body without compression; never holds more than the limit. Raises TooLarge or InvalidInput."""
        try:
            plain, is_whole = _DECOMPRESSORS[self.encoding](self.sent)
        except (zlib.error, zstandard.ZstdError):
            plain, is_whole = b"", False
        if len(plain) > MAX_DECOMPRESSED_BYTES:
            raise _too_large(MAX_DECOMPRESSED_BYTES, "after decompression")
        if not is_whole:
            raise InvalidInput(f"The body is not one whole {self.encoding} stream: compress it again.", field="body")
        return plain


async def read_body(request: Request) -> Body:
    """Read the body up to the limit, after a check of media type and encoding.

    Does not decompress or parse it: the endpoint does both in a thread, because they take time.
    """
    settings: Settings = request.app.state.services.settings
    headers = request.headers
    content_type = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if content_type in _MSGPACK_NAMES:
        content_type = MSGPACK
    elif content_type != JSON:
        raise UnsupportedMedia(f"Content-Type {content_type!r} is not supported: send {JSON} or {MSGPACK}.")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in _DECOMPRESSORS:
        raise UnsupportedMedia(f"Content-Encoding {encoding!r} is not supported: send gzip, zstd or none.")
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > settings.max_body_bytes:
        raise _too_large(settings.max_body_bytes, "as sent")
    return Body(content_type, encoding, await request.body())  # `RequestMiddleware` stops one that declares no length


def parse(model: type[M], body: Body) -> M:
    """The body as a wire model. Raises pydantic.ValidationError and what `Body.plain` raises."""
    plain = body.plain()
    if body.content_type == JSON:
        check_members(plain)
        if plain.count(b",") > MAX_VALUES:
            raise _too_many(MAX_VALUES, "values")
        return model.model_validate_json(plain)
    return model.model_validate(unpack(plain))


def check_members(plain: bytes) -> None:
    """Raise TooLarge for JSON with more members, lists or maps than any model has, before anything is built of it."""
    if max(plain.count(mark) for mark in (b":", b"[", b"{")) > MAX_MEMBERS:
        raise _too_many(MAX_MEMBERS, "members")


def unpack(plain: bytes, *, max_values: int = MAX_VALUES) -> Any:
    """MessagePack as Python objects; byte strings stay bytes. Raises InvalidInput, TooLarge."""
    values = containers = 0

    def counted(container: Any) -> Any:
        nonlocal values, containers
        values, containers = values + len(container), containers + 1
        if containers > MAX_MEMBERS:
            raise _too_many(MAX_MEMBERS, "members")
        if values > max_values:
            raise _too_many(max_values, "values")
        return container

    try:
        return msgpack.unpackb(
            plain,
            raw=False,
            strict_map_key=True,
            max_ext_len=0,
            max_array_len=max_values,
            max_map_len=MAX_MEMBERS,
            list_hook=counted,
            object_hook=counted,
        )
    except (ValueError, TypeError, RecursionError) as error:
        for limit, kind in (("max_array_len", "values"), ("max_map_len", "members")):
            if f"exceeds {limit}" in str(error):
                raise _too_many(MAX_MEMBERS if kind == "members" else max_values, kind) from None
        raise InvalidInput("The body is not valid MessagePack: check how it is packed.", field="body") from error


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a body that is read by `read_body`, as JSON, the one type that generators know."""
    content = {JSON: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _gzip(sent: bytes) -> tuple[bytes, bool]:
    stream = zlib.decompressobj(wbits=31)
    plain = stream.decompress(sent, MAX_DECOMPRESSED_BYTES + 1)
    return plain, stream.eof and not stream.unused_data


def _zstd(sent: bytes) -> tuple[bytes, bool]:
    stream = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(sent)
    plain = bytes(stream.read(MAX_DECOMPRESSED_BYTES + 1))
    return plain, bool(plain) or not sent


_DECOMPRESSORS: Final[dict[str, Callable[[bytes], tuple[bytes, bool]]]] = {
    "identity": lambda sent: (sent, True),
    "gzip": _gzip,
    "zstd": _zstd,
}
"""At most a byte more than the limit of what was sent, and whether that is a whole stream."""


def _too_large(limit: int, when: str) -> TooLarge:
    return TooLarge(f"The body is larger than {limit} bytes {when}: send smaller batches.")


def _too_many(limit: int, kind: str) -> TooLarge:
    return TooLarge(f"The body holds more than {limit} {kind}: send smaller batches.")
