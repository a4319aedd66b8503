"""Pulls the values that a user set on the service for a job's gradient scaling."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

from tula_agent.guard import logger
from tula_agent.scaling.policies import Served
from tula_wire import routes

if TYPE_CHECKING:
    from tula_agent.ship.transport import Transport


RETRY_S = 10.0


class ServedNumbers:
    """Pulls the values on the first rank's shipping thread, at the start and, for `ags` and `static`, after each epoch.

    optimizer: a `TulaOptimizer`, to which only a weak reference is kept. An invalid response is ignored, with a warning
    the first time, and the request is repeated.
    """

    def __init__(self, job_id: str, optimizer: Any) -> None:
        self._policy: str = optimizer.policy.name
        self._path = f"{routes.JOB_SCALING.format(job_id=job_id)}?policy={self._policy}"
        self._optimizer = weakref.ref(optimizer)
        self._etag: str | None = None
        self._pulled_in = -1
        self._due = 0.0
        self._warned = False

    @property
    def wanted(self) -> bool:
        """Return False once the script has released its optimizer."""
        return self._optimizer() is not None

    def poll(self, transport: Transport) -> None:
        """Send one request if an epoch has begun since the last response; retry later if the request fails."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        epoch = optimizer.epoch if self._policy in ("ags", "static") else 0
        now = time.monotonic()
        if self._pulled_in >= epoch or now < self._due:
            return
        self._due = now + RETRY_S
        reply = transport.get(self._path, self._etag)
        if reply.verdict != "delivered":
            return
        if reply.body is None:  # unchanged
            self._pulled_in, self._due = epoch, 0.0
            return
        try:
            optimizer.use_served(Served.from_answer(reply.body, self._policy))
        except ValueError as error:
            if not self._warned:
                logger.warning("the service's gradient-scaling values are ignored: %s", error)
            self._warned = True
            return
        self._pulled_in, self._due, self._etag = epoch, 0.0, reply.etag
