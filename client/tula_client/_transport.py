"""Sends requests with httpx and retries them; the only module that imports httpx besides `_client`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Final, TypeVar

import httpx

from tula_client._calls import parse_error
from tula_client._errors import ServiceUnreachableError, TulaError, UnexpectedAnswerError
from tula_client._request import Answer, Call, Outcome, Question, Request, RetryPolicy, Work
from tula_wire.retry import retry_after_s

T = TypeVar("T")
Step = Request | float | Work
"""A request to send, seconds to wait, or work to do."""
Received = Answer | httpx.TransportError | None

MAX_ANSWER_BYTES: Final = 256 * 2**20
"""A longer answer is dropped: no Tula service gives one."""

STREAM_TIMEOUT: Final = httpx.Timeout(10.0, read=60.0)
"""The service sends a comment every few seconds, so a stream of events is never silent for 60 s."""

NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass
class SyncTransport:
    """Sends requests over an `httpx.Client`; waits between attempts with `sleep`."""

    http: httpx.Client
    policy: RetryPolicy
    sleep: Callable[[float], None] = field(default=time.sleep)

    def send(self, question: Question[T]) -> T:
        """The answer to a call, or the result of a flow; raises `TulaError`."""
        steps = _steps(question, self.policy, str(self.http.base_url))
        received: Received = None
        try:
            while True:
                received = self._take(steps.send(received))
        except StopIteration as end:
            result: T = end.value
            return result

    def lines(self, request: Request) -> Iterator[str]:
        """The lines of a stream; raises `TulaError` if rejected, `ServiceUnreachableError` if the connection breaks."""
        try:
            with self.http.stream(**_arguments(request), timeout=STREAM_TIMEOUT) as response:
                if response.status_code != 200:
                    raise parse_error(Answer(response.status_code, response.headers, response.read()))
                yield from response.iter_lines()
        except httpx.TransportError as error:
            raise _unreachable(str(self.http.base_url), error) from error

    def _take(self, step: Step) -> Received:
        if callable(step):
            step()
            return None
        if not isinstance(step, Request):
            self.sleep(step)
            return None
        try:
            with self.http.stream(**_arguments(step)) as response:
                body = bytearray()
                for part in response.iter_bytes():
                    _append(body, part)
                return Answer(response.status_code, response.headers, bytes(body))
        except httpx.TransportError as error:
            return error


@dataclass
class AsyncTransport:
    """Like `SyncTransport`, over an `httpx.AsyncClient`."""

    http: httpx.AsyncClient
    policy: RetryPolicy

    async def send(self, question: Question[T]) -> T:
        """Like `SyncTransport.send`."""
        steps = _steps(question, self.policy, str(self.http.base_url))
        received: Received = None
        try:
            while True:
                received = await self._take(steps.send(received))
        except StopIteration as end:
            result: T = end.value
            return result

    async def lines(self, request: Request) -> AsyncIterator[str]:
        """Like `SyncTransport.lines`."""
        try:
            async with self.http.stream(**_arguments(request), timeout=STREAM_TIMEOUT) as response:
                if response.status_code != 200:
                    raise parse_error(Answer(response.status_code, response.headers, await response.aread()))
                async for line in response.aiter_lines():
                    yield line
        except httpx.TransportError as error:
            raise _unreachable(str(self.http.base_url), error) from error

    async def _take(self, step: Step) -> Received:
        if callable(step):
            await asyncio.to_thread(step)
            return None
        if not isinstance(step, Request):
            await asyncio.sleep(step)
            return None
        try:
            async with self.http.stream(**_arguments(step)) as response:
                body = bytearray()
                async for part in response.aiter_bytes():
                    _append(body, part)
                return Answer(response.status_code, response.headers, bytes(body))
        except httpx.TransportError as error:
            return error


def _steps(question: Question[T], policy: RetryPolicy, url: str) -> Generator[Step, Received, T]:
    """The requests and waits of a flow; an error of a call is raised where the flow asked."""
    flow = iter(question)
    try:
        asked = next(flow)
        while True:
            try:
                answer = (yield from _attempts(asked, policy, url)) if isinstance(asked, Call) else (yield asked)
            except TulaError as error:
                asked = flow.throw(error)
            else:
                asked = flow.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def _attempts(call: Call[T], policy: RetryPolicy, url: str) -> Generator[Step, Received, T]:
    """The requests of one call and the waits between them."""
    attempt, waited_s = 0, 0.0
    while True:
        attempt += 1
        received = yield call.request
        if isinstance(received, Answer):
            asked = retry_after_s(received.headers.get("retry-after"), datetime.now(timezone.utc))
            outcome = Outcome(status=received.status, retry_after_s=asked)
        else:
            outcome = Outcome(failure="not_sent" if isinstance(received, NOT_SENT) else "lost")
        wait = policy.wait_s(
            outcome, attempt=attempt, waited_s=waited_s, idempotent=call.request.idempotent, dice=random.random()
        )
        if wait is not None:
            waited_s += wait
            yield wait
        elif isinstance(received, Answer):
            return call.parse(received)
        else:
            raise _unreachable(url, received) from received


def _unreachable(url: str, error: Exception | None) -> TulaError:
    """The exception for every way to get no answer."""
    reason = "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
    remedy = "start one with tula serve, or set TULA_URL"
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        remedy = "name the file of the authority that signed its certificate in SSL_CERT_FILE"
    return ServiceUnreachableError(f"no Tula service answers at {url.rstrip('/')} ({reason}): {remedy}")


def _append(body: bytearray, part: bytes) -> None:
    body += part
    if len(body) > MAX_ANSWER_BYTES:
        raise UnexpectedAnswerError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes: ask for a smaller page")


def _arguments(request: Request) -> dict[str, Any]:
    return {
        "method": request.method,
        "url": request.path,
        "params": list(request.query) or None,
        "content": request.body,
        "headers": dict(request.headers),
    }
