"""Calls the service again while it is unreachable, so that a restart of the service ends no `tula tune`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tula_client._errors import ServiceUnavailableError, ServiceUnreachableError, TooManyRequestsError
from tula_client.launch.report import Reporter

P = ParamSpec("P")
T = TypeVar("T")

UNREACHABLE = (ServiceUnreachableError, ServiceUnavailableError, TooManyRequestsError)
"""Errors after which the service is expected to answer again."""

_INTERVAL_S = 1.0


class RetryUntilBack:
    """Repeats a call once a second while the service is unreachable, for at most `timeout_s`."""

    def __init__(
        self,
        timeout_s: float,
        reporter: Reporter,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._timeout_s = timeout_s
        self._reporter = reporter
        self._clock = clock
        self._sleep = sleep

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The answer of `call`; after `timeout_s`, raises the error of the last attempt."""
        deadline = self._clock() + self._timeout_s
        reported = False
        while True:
            try:
                return call(*args, **kwargs)
            except UNREACHABLE as error:  # noqa: PERF203
                if self._clock() >= deadline:
                    raise
                if not reported:
                    reported = True
                    self._reporter.waiting(f"The service is unreachable ({error}): retrying for {self._timeout_s:g} s.")
                self._sleep(_INTERVAL_S)
