"""One request on its way to the service, as bytes: the same in memory, on the network and on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class SpooledRequest:
    """A request without its token.

    `values`: how many measurements are lost if it is dropped. `keep`: write it to disk while the service is away; a
    heartbeat is not worth that.
    """

    method: Literal["POST", "PATCH"]
    path: str
    body: bytes
    values: int = 0
    keep: bool = True

    def to_record(self) -> bytes:
        """Payload of one spool record."""
        head = json.dumps({"method": self.method, "path": self.path, "values": self.values})
        return head.encode() + b"\n" + self.body

    @classmethod
    def from_record(cls, payload: bytes) -> SpooledRequest:
        """Inverse of `to_record`. Raises ValueError for any other payload."""
        head, _, body = payload.partition(b"\n")
        fields = json.loads(head)
        method, path = fields.get("method"), fields.get("path")
        if method not in ("POST", "PATCH") or not isinstance(path, str) or not path.startswith("/v1/runs/"):
            raise ValueError(f"a spool record asks for {method!r} {path!r}: only the routes of a run are allowed")
        return cls(method, path, body, int(fields.get("values", 0)))


def encode(body: dict[str, Any]) -> bytes:
    """Compact JSON. Raises ValueError for NaN and infinity, which JSON does not have."""
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
