"""Reports a training run's progress to a Kubeflow TrainJob if the Trainer's controller requests it (KEP-2779)."""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, Self

from tula_agent.guard import logger
from tula_agent.ship.exporter import pause_s
from tula_agent.ship.spool import encode
from tula_agent.ship.transport import Transport
from tula_wire import Progress, read, routes

URL, CA_FILE, TOKEN_FILE = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
"""Environment variables that the controller sets in a TrainJob's pods: the address to which the status is posted, the
certificate authority's file, and the file with the pod's token.
"""
EVERY_S: Final = 15.0
"""Seconds between two posts; the controller limits the rate of posts."""
TIMEOUT_S: Final = 2.0
MOST_METRICS: Final = 100
_INT32: Final = 2**31 - 1


class TrainJobStatus:
    """Posts a training run's progress, remaining time, cost and metrics from the shipping thread of the first rank.

    newest: a function that returns the latest values that the script and the agent have logged, keyed by name. The
    progress comes from the service, which stores the run's length, speed and prices.
    """

    def __init__(self, url: str, ca_file: str, token_file: str, newest: Callable[[], Mapping[str, float]]) -> None:
        self._url, self._ca_file, self._token_file = url, ca_file, token_file
        self._newest = newest
        self._server: Transport | None = None
        self._due = 0.0
        self._failures = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], newest: Callable[[], Mapping[str, float]]) -> Self | None:
        """Return an instance, or None if no controller requests the status."""
        url = environ.get(URL, "")
        if not url.startswith(("http://", "https://")):
            return None
        return cls(url, environ.get(CA_FILE, ""), environ.get(TOKEN_FILE, ""), newest)

    def report(self, service: Transport, run_id: str, *, last: bool) -> None:
        """Post the status if it is due or `last` is True (at the end of training). Takes a few seconds at most.

        Raises OSError if a file cannot be read, and ValueError if the service's response is invalid.
        """
        now = time.monotonic()
        if now < self._due and not last:
            return
        self._due = now + EVERY_S
        answer = service.get(routes.RUN_PROGRESS.format(run_id=run_id))
        if answer.verdict != "delivered" or answer.body is None:
            return
        status = trainer_status(read(Progress, answer.body), self._newest(), datetime.now(timezone.utc))
        if self._server is None:
            verify = ssl.create_default_context(cafile=self._ca_file or None)
            self._server = Transport(self._url, None, TIMEOUT_S, verify=verify)
        headers = {}
        if self._token_file:  # read each time: Kubernetes renews the token within an hour
            headers["authorization"] = f"Bearer {Path(self._token_file).read_text().strip()}"
        reply = self._server.exchange("POST", self._url, encode({"trainerStatus": status}), headers)
        if 200 <= reply.status < 300:
            self._failures = 0
            return
        self._failures += 1
        self._due = now + max(EVERY_S, pause_s(self._failures, reply))
        if self._failures == 1:
            reason = f"{reply.status or ''} {reply.detail}".strip()
            logger.warning("the TrainJob's status cannot be updated at present, but training continues: %s", reason)

    def close(self) -> None:
        """Close the connection."""
        if self._server is not None:
            self._server.close()


def trainer_status(progress: Progress, newest: Mapping[str, float], now: datetime) -> dict[str, Any]:
    """Return a TrainJob's `trainerStatus` (trainer.kubeflow.org/v1alpha1); omit fields whose values are unknown."""
    own = progress.model_dump(include={"spent_usd", "step_time_s"}, exclude_none=True)
    facts = {**own, **newest, **own}  # these come first, and the service's values take precedence
    metrics = [{"name": name, "value": f"{value:.6g}"} for name, value in facts.items() if math.isfinite(value)]
    status: dict[str, Any] = {"metrics": metrics[:MOST_METRICS], "lastUpdatedTime": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
    if progress.done is not None:
        status["progressPercentage"] = min(100, max(0, int(100 * progress.done)))
    if progress.left_s is not None:
        status["estimatedRemainingSeconds"] = min(_INT32, max(0, round(progress.left_s)))
    return status
