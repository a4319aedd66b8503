"""Parses a stream of server-sent events (WHATWG HTML, section 9.2) and keeps the position to resume at. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import ValidationError

from tula_wire import Event, read


@dataclass
class EventReader:
    """Turns lines into events, each once, in order.

    `last_id` is the `Last-Event-ID` to reconnect with. `retry_s` is the wait that the server asked for. Comments,
    unknown fields and events of unknown kinds are skipped.
    """

    last_id: int | None = None
    retry_s: float = 1.0
    failures: int = 0
    _data: list[str] = field(default_factory=list)
    _pending_id: int | None = None
    _delivered: int = -1

    def feed(self, line: str) -> Event | None:
        """Parse one line without its line ending; the event that it completes, or None."""
        if not line:
            return self._complete()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry_s = min(60.0, int(value[:9]) / 1000)
        elif name == "id" and value.isascii() and value.isdigit():
            self._pending_id = int(value[:18])
        return None

    def disconnected(self) -> float:
        """Record that the stream ended; seconds to wait before connecting again, doubling up to 30 s."""
        self._data.clear()
        self._pending_id = None
        self.failures += 1
        return min(30.0, self.retry_s * 2.0 ** min(self.failures - 1, 5))

    def _complete(self) -> Event | None:
        text, self._data = "\n".join(self._data), []
        if self._pending_id is not None:
            self.last_id, self._pending_id = max(self.last_id or 0, self._pending_id), None
        if not text:
            return None
        try:
            event = read(Event, text)
        except ValidationError:
            return None
        self.failures = 0
        self.last_id = max(self.last_id or 0, event.id)
        if event.id <= self._delivered:
            return None
        self._delivered = event.id
        return event
