"""Sends requests with httpx and retries them; the only module that imports httpx besides `_client`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Final, TypedDict, TypeVar

import httpx

from tula_client._calls import parse_error
from tula_client._errors import ServiceUnreachableError, TulaError, UnexpectedAnswerError
from tula_client._request import Answer, Call, Request
from tula_client._retry import Outcome, RetryPolicy
from tula_wire.retry import retry_after_s

T = TypeVar("T")

MAX_ANSWER_BYTES: Final = 256 * 2**20
"""A longer answer is dropped: no Tula service gives one."""

STREAM_TIMEOUT: Final = httpx.Timeout(10.0, read=60.0)
"""The service sends a comment every few seconds, so a stream of events is never silent for 60 s."""

NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass
class Attempts:
    """The attempts of one call: computes the wait before the next."""

    request: Request
    policy: RetryPolicy
    url: str
    attempt: int = 0
    waited_s: float = 0.0

    def after_answer(self, answer: Answer) -> float | None:
        """Seconds to wait before another attempt, or None when `answer` is final."""
        asked = retry_after_s(answer.headers.get("retry-after"), datetime.now(timezone.utc))
        return self._wait_s(Outcome(status=answer.status, retry_after_s=asked))

    def after_failure(self, error: httpx.TransportError) -> float:
        """Seconds to wait before another attempt; raises `ServiceUnreachableError` after the last."""
        wait = self._wait_s(Outcome(failure="not_sent" if isinstance(error, NOT_SENT) else "lost"))
        if wait is None:
            raise unreachable(self.url, error) from error
        return wait

    def _wait_s(self, outcome: Outcome) -> float | None:
        self.attempt += 1
        wait = self.policy.wait_s(
            outcome,
            attempt=self.attempt,
            waited_s=self.waited_s,
            idempotent=self.request.idempotent,
            dice=random.random(),
        )
        self.waited_s += wait or 0.0
        return wait


@dataclass
class SyncTransport:
    """Sends calls over an `httpx.Client`; waits between attempts with `sleep`."""

    http: httpx.Client
    policy: RetryPolicy
    sleep: Callable[[float], None] = field(default=time.sleep)

    def send(self, call: Call[T]) -> T:
        """Send `call` and parse its answer; raises `TulaError`."""
        attempts = Attempts(call.request, self.policy, str(self.http.base_url))
        while True:
            try:
                answer = self._once(call.request)
            except httpx.TransportError as error:
                self.sleep(attempts.after_failure(error))
                continue
            if (wait := attempts.after_answer(answer)) is None:
                return call.parse(answer)
            self.sleep(wait)

    def lines(self, request: Request) -> Iterator[str]:
        """The lines of a stream; raises `TulaError` if rejected, `ServiceUnreachableError` if the connection breaks."""
        try:
            with self.http.stream(**_arguments(request), timeout=STREAM_TIMEOUT) as response:
                if response.status_code != 200:
                    raise parse_error(Answer(response.status_code, response.headers, response.read()))
                yield from response.iter_lines()
        except httpx.TransportError as error:
            raise unreachable(str(self.http.base_url), error) from error

    def _once(self, request: Request) -> Answer:
        with self.http.stream(**_arguments(request)) as response:
            body = bytearray()
            for part in response.iter_bytes():
                body += part
                _check_size(body)
            return Answer(response.status_code, response.headers, bytes(body))


@dataclass
class AsyncTransport:
    """Sends calls over an `httpx.AsyncClient`."""

    http: httpx.AsyncClient
    policy: RetryPolicy

    async def send(self, call: Call[T]) -> T:
        """Send `call` and parse its answer; raises `TulaError`."""
        attempts = Attempts(call.request, self.policy, str(self.http.base_url))
        while True:
            try:
                answer = await self._once(call.request)
            except httpx.TransportError as error:
                await asyncio.sleep(attempts.after_failure(error))
                continue
            if (wait := attempts.after_answer(answer)) is None:
                return call.parse(answer)
            await asyncio.sleep(wait)

    async def lines(self, request: Request) -> AsyncIterator[str]:
        """Like `SyncTransport.lines`."""
        try:
            async with self.http.stream(**_arguments(request), timeout=STREAM_TIMEOUT) as response:
                if response.status_code != 200:
                    raise parse_error(Answer(response.status_code, response.headers, await response.aread()))
                async for line in response.aiter_lines():
                    yield line
        except httpx.TransportError as error:
            raise unreachable(str(self.http.base_url), error) from error

    async def _once(self, request: Request) -> Answer:
        async with self.http.stream(**_arguments(request)) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                _check_size(body)
            return Answer(response.status_code, response.headers, bytes(body))


def unreachable(url: str, error: Exception) -> TulaError:
    """The exception for every way to get no answer."""
    reason = "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
    remedy = "start one with tula serve, or set TULA_URL"
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        remedy = "name the file of the authority that signed its certificate in SSL_CERT_FILE"
    return ServiceUnreachableError(f"no Tula service answers at {url.rstrip('/')} ({reason}): {remedy}")


def _check_size(body: bytearray) -> None:
    if len(body) > MAX_ANSWER_BYTES:
        raise UnexpectedAnswerError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes: ask for a smaller page")


class _Arguments(TypedDict):
    method: str
    url: str
    params: list[tuple[str, str | int | float | bool | None]] | None
    content: bytes | None
    headers: dict[str, str]


def _arguments(request: Request) -> _Arguments:
    return {
        "method": request.method,
        "url": request.path,
        "params": list(request.query) or None,
        "content": request.body,
        "headers": dict(request.headers),
    }
