"""Server-sent events of a job."""

from __future__ import annotations

from typing import Any, Literal

from tula_wire._base import Timestamp, WireModel

EventKind = Literal["job", "run", "samples", "recommendation", "scaling", "drift", "advice"]


class Event(WireModel):
    """A change of a job. Ids increase, so that a reader resumes after the last event it received."""

    id: int
    kind: EventKind
    job_id: str
    run_id: str | None = None
    at: Timestamp
    data: dict[str, Any] = {}
