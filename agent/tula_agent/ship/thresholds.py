"""Thresholds of gradient scaling travel the other way: polled with their ETag, handed to the optimizer."""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from typing import Any

from tula_agent.ship.transport import Transport

__all__ = ["ThresholdPoller"]

POLL_EVERY_S = 10.0


class ThresholdPoller:
    """Asks `path` every POLL_EVERY_S on the shipping thread; a new version goes to the optimizer.

    What the service leaves open stays as the script's arguments have it, and a job's other runs, `run_id` being this
    one, may go back without us. The optimizer itself brings it to all ranks at one step, so only the first rank polls.
    """

    def __init__(self, path: str, optimizer: Any, run_id: str | None = None, *, every_s: float = POLL_EVERY_S) -> None:
        self.version: int | None = None
        self._path = path
        self._run_id = run_id
        self._scripted = optimizer.scripted_thresholds
        self._apply = weakref.WeakMethod(optimizer.apply_thresholds)
        self._every = every_s
        self._etag: str | None = None
        self._due = 0.0

    @property
    def wanted(self) -> bool:
        """False once the script has let its optimizer go."""
        return self._apply() is not None

    def poll(self, transport: Transport) -> None:
        """One cheap question, if it is time. Raises ValueError when the answer makes no sense."""
        now = time.monotonic()
        if now < self._due or not self.wanted:
            return
        self._due = now + self._every
        reply = transport.get(self._path, self._etag)
        if reply.verdict != "delivered" or reply.body is None:
            return
        thresholds = self._scripted.served(reply.body)
        if reply.body.get("restore_run_id", self._run_id) != self._run_id:
            thresholds = replace(thresholds, restore_step=None)  # that step is of another run
        self._etag = reply.etag
        apply = self._apply()
        if apply is not None and thresholds.version != self.version:
            self.version = thresholds.version
            apply(thresholds)
