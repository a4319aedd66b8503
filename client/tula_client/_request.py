"""Represents requests, responses, retries and flows of several calls as values; the clients perform the I/O."""

from __future__ import annotations

import functools
import inspect
import random
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
    get_type_hints,
    overload,
)
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from tula_client._errors import ServiceUnreachableError, TulaError
from tula_wire.retry import backoff_s, retry_after_s

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

NOT_PROCESSED: Final = frozenset({429, 503})
"""HTTP statuses that mean that the server has not processed the request."""
MAYBE_PROCESSED: Final = frozenset({502, 504})
"""HTTP statuses from a gateway that cannot tell whether the server processed the request."""
NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Failures to connect, after which the request cannot have reached the service; after any other failure it may have."""


@dataclass(frozen=True)
class Request:
    """A request that is ready to be sent."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotent: bool = True


@dataclass(frozen=True)
class Answer:
    """A response; `headers` expects header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request and the parser of its response; `parse` raises `TulaError` if the call failed."""

    request: Request
    parse: Callable[[Answer], T]

    def __iter__(self) -> Generator[Call[T], T, T]:
        """Yield this call, so that `yield from call` in a flow returns the parsed response."""
        return (yield self)


Work = Callable[[], None]
"""Work that would block an event loop; `AsyncClient` runs it in a thread."""
Flow = Generator[Call[Any] | float | Work, Any, T]
"""A generator that yields calls and receives their responses; it may also yield seconds to wait or work to run."""
Step = Request | float | Work
"""A request to send, seconds to wait, or work to run."""
Received = Answer | httpx.TransportError | None


class Question(Protocol[T_co]):
    """A call or a flow."""

    def __iter__(self) -> Flow[T_co]:
        """Return a generator that yields the calls and returns the result."""
        ...


class Blocking:
    """Base of classes whose `Method`s return the result directly."""


class Awaited:
    """Base of classes whose `Method`s return an awaitable."""


class Unsent:
    """Base of classes whose `Method`s return the call or flow itself, unless the class is `Blocking` or `Awaited`."""


class Method(Generic[P, T]):
    """A method of both kinds of client, which sends the call or flow that `build` returns.

    The method's owner is either a client or an object with a client in its attribute `client`. The first argument of
    `build` is the owner or, if `attribute` is given, the owner's attribute of that name.
    """

    def __init__(self, build: Callable[Concatenate[Any, P], Question[T]], attribute: str = "") -> None:
        self.build = build
        self.attribute = attribute
        self.functions: dict[type, Callable[..., Any]] = {}

    def __set_name__(self, kind: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, owner: None, kind: Any) -> Callable[..., Any]: ...

    @overload
    def __get__(self, owner: Blocking, kind: type[Blocking]) -> Callable[P, T]: ...

    @overload
    def __get__(self, owner: Awaited, kind: type[Awaited]) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def __get__(self, owner: Unsent, kind: type[Unsent]) -> Callable[P, Question[T]]: ...

    def __get__(self, owner: Any, kind: Any) -> Any:
        if kind not in self.functions:
            self.functions[kind] = self._function(kind)
        function = self.functions[kind]
        return function if owner is None else types.MethodType(function, owner)

    def _function(self, kind: type) -> Any:
        """Return the function that implements this method in class `kind`; it takes the instance as first argument."""
        if not issubclass(kind, (Blocking, Awaited)):
            return self.build

        def send(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            first = getattr(owner, self.attribute) if self.attribute else owner
            return getattr(owner, "client", owner).send(self.build(first, *args, **kwargs))

        async def send_awaited(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            return await send(owner, *args, **kwargs)

        function: Any = send_awaited if issubclass(kind, Awaited) else send
        functools.update_wrapper(function, self.build)
        function.__module__, function.__name__ = kind.__module__, self.name
        function.__qualname__ = f"{kind.__qualname__}.{self.name}"
        function.__signature__ = signature = _signature(self.build)
        annotated = {parameter.name: parameter.annotation for parameter in list(signature.parameters.values())[1:]}
        function.__annotations__ = annotated | {"return": signature.return_annotation}
        return function


def _signature(build: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that notebooks and `help` show for a method whose calls `build` returns.

    The annotations are resolved to types rather than left as strings.
    """
    hints = get_type_hints(build)
    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    others = list(inspect.signature(build).parameters.values())[1:]
    parameters = [owner, *(parameter.replace(annotation=hints[parameter.name]) for parameter in others)]
    return inspect.Signature(parameters, return_annotation=get_args(hints["return"])[-1])


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with full jitter (`tula_wire.retry`), with limits on attempts and on the total waiting time.

    A request that is not idempotent is retried only if the service cannot have acted on it (`worth_repeating`).
    """

    max_attempts: int = 5
    base_s: float = 0.2
    cap_s: float = 5.0
    budget_s: float = 30.0

    def wait_s(self, *, attempt: int, waited_s: float, asked_s: float | None, dice: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up.

        `attempt` counts from 1, `waited_s` is the sum of earlier waits, `asked_s` is the wait that the service
        requested, and `dice` is uniform in [0, 1).
        """
        if attempt >= self.max_attempts:
            return None
        wait = backoff_s(attempt, dice, base_s=self.base_s, cap_s=self.cap_s, asked_s=asked_s)
        return wait if waited_s + wait <= self.budget_s else None


NO_RETRY: Final = RetryPolicy(max_attempts=1)


def worth_repeating(received: Received, *, idempotent: bool) -> bool:
    """Return True if another attempt might succeed and cannot do harm."""
    if isinstance(received, Answer):
        return received.status in NOT_PROCESSED or (idempotent and received.status in MAYBE_PROCESSED)
    return idempotent or isinstance(received, NOT_SENT)


def steps(question: Question[T], policy: RetryPolicy, url: str) -> Generator[Step, Received, T]:
    """Yield the requests and waits of a flow; if a call fails, raise its error inside the flow at that call."""
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
    """Yield the attempts at one call and the waits between them, then return the parsed response."""
    attempt, waited_s = 0, 0.0
    while True:
        attempt += 1
        received = yield call.request
        wait = None
        if worth_repeating(received, idempotent=call.request.idempotent):
            header = received.headers.get("retry-after") if isinstance(received, Answer) else None
            asked_s = retry_after_s(header, datetime.now(timezone.utc))
            wait = policy.wait_s(attempt=attempt, waited_s=waited_s, asked_s=asked_s, dice=random.random())
        if wait is not None:
            waited_s += wait
            yield wait
        elif isinstance(received, Answer):
            return call.parse(received)
        else:
            raise _unanswered(url, received) from received


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment sets for this address, or None; the proxy's credentials are removed."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme) or getproxies().get("all")
    if proxy is None or proxy_bypass(parts.netloc):
        return None
    return urlsplit(proxy)._replace(netloc=urlsplit(proxy).netloc.rpartition("@")[2]).geturl()


def _unanswered(url: str, error: Exception | None) -> ServiceUnreachableError:
    """Return the exception for a request that received no response."""
    reason = "timed out" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
    remedy = "start one with tula serve, or set TULA_URL"
    if proxy := proxy_for(url):
        host = urlsplit(url).hostname
        reason, remedy = f"{reason}, through the proxy {proxy}", f"add {host} to NO_PROXY if no proxy is needed"
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        remedy = "set SSL_CERT_FILE to the certificate file of the authority that signed the service's certificate"
    return ServiceUnreachableError(f"no Tula service responds at {url.rstrip('/')} ({reason}): {remedy}")
