"""One request on its way to the service, as bytes, so that memory, network and disk all hold the same thing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Envelope", "encode"]


@dataclass(frozen=True)
class Envelope:
    """A request without its token. `values` is how many measurements are lost if it is dropped."""

    method: Literal["POST", "PATCH"]
    path: str
    body: bytes
    values: int = 0
    keep: bool = True  # worth spooling: facts are, a sign of life is not

    def to_record(self) -> bytes:
        """One spool record's payload."""
        head = json.dumps({"method": self.method, "path": self.path, "values": self.values})
        return head.encode() + b"\n" + self.body

    @classmethod
    def from_record(cls, payload: bytes) -> Envelope:
        """Inverse of `to_record`. Raises ValueError for anything that is not one of ours."""
        head, _, body = payload.partition(b"\n")
        fields = json.loads(head)
        method, path = fields.get("method"), fields.get("path")
        if method not in ("POST", "PATCH") or not isinstance(path, str) or not path.startswith("/v1/runs/"):
            raise ValueError(f"a spool record asks for {method!r} {path!r}: only a run's own routes are allowed")
        return cls(method, path, body, int(fields.get("values", 0)))


def encode(body: dict[str, Any]) -> bytes:
    """Compact JSON. Raises ValueError for NaN and infinity, which nobody on the wire accepts."""
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
