"""What a connection may take before there is a request: so many bytes and seconds for its head, and for an unread body.

Whoever sends a head needs no token, and uvicorn bounds it only with its slower parser.
"""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tula_wire import MEDIA_TYPE, Problem, ProblemType

__all__ = ["MOST_HEAD_BYTES", "BoundedProtocol"]

MOST_HEAD_BYTES: Final = 64 * 1024
"""Request line and headers together; a token has 48 bytes, and the longest query a few thousand."""

_REASON: Final = "Request Header Fields Too Large"


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol over httptools, which hangs up on a head that is too large or takes longer than `seconds`.

    So it does when a request was answered before its body was there, and the rest does not come.
    """

    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds = seconds
        self._deadline: TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """The first head is expected from now on."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is expected any more."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; then look whether a head is still unfinished."""
        super().data_received(data)
        if not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse()
        else:
            self._arm()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """It is there: whatever comes now is the application's to bound."""
        self._in_head = False
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is there too."""
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Answered: where that was before the end of the body, the rest has to come soon."""
        unread = self.cycle is not None and self.cycle.more_body
        super().on_response_complete()
        if unread:
            self._arm()

    def _arm(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self.transport.close)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self) -> None:
        if self.transport.is_closing():
            return
        detail = f"The head of the request is larger than {MOST_HEAD_BYTES} bytes: send shorter headers."
        problem = Problem(type=ProblemType.TOO_LARGE, title=_REASON, status=431, detail=detail)
        body = problem.model_dump_json().encode()
        head = f"HTTP/1.1 431 {_REASON}\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
