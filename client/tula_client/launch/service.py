"""What launching needs of the service, and waiting for one that is away for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from tula_client._errors import ServiceUnavailableError, ServiceUnreachableError, TooManyRequestsError
from tula_client.launch.report import Reporter
from tula_wire import (
    ClaimRequest,
    Job,
    JobCreated,
    JobSpec,
    Objective,
    Recommendation,
    Run,
    RunClaimed,
    RunCreate,
    RunPatch,
)

__all__ = ["Patience", "Service"]

P = ParamSpec("P")
T = TypeVar("T")

AWAY = (ServiceUnreachableError, ServiceUnavailableError, TooManyRequestsError)
"""What a service raises that is expected back."""


class Service(Protocol):
    """The calls that launching makes; `tula_client.Client` has them all."""

    def register(self, spec: JobSpec, *, idempotency_key: str | None = None) -> JobCreated:
        """Register a job, or find it again under the same key."""

    def job(self, job_id: str) -> Job:
        """A job with its plan."""

    def claim(self, job_id: str, claim: ClaimRequest) -> RunClaimed:
        """Lease the next run of the plan."""

    def create_run(self, job_id: str, run: RunCreate) -> Run:
        """Register a run outside the plan."""

    def run(self, run_id: str) -> Run:
        """One run."""

    def patch_run(self, run_id: str, patch: RunPatch) -> Run:
        """Move a run on or renew its lease."""

    def recommendation(self, job_id: str, *, objective: Objective | None = None) -> Recommendation:
        """What to use."""


class Patience:
    """Calls the service, and calls again while it is away, for at most `patience_s`."""

    def __init__(
        self,
        patience_s: float,
        reporter: Reporter,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._patience_s = patience_s
        self._reporter = reporter
        self._clock = clock
        self._sleep = sleep

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The answer of `call`; raises what it raised last when the service stays away."""
        until = self._clock() + self._patience_s
        told = False
        while True:
            try:
                return call(*args, **kwargs)
            except AWAY as error:  # noqa: PERF203
                if self._clock() >= until:
                    raise
                if not told:
                    told = True
                    self._reporter.waiting(
                        f"The service is away ({error}): waiting up to {self._patience_s:g} s for it."
                    )
                self._sleep(1.0)
