"""Requests, answers and retries as values, and flows of several calls, all without I/O; `_transport` sends them."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
    overload,
)

from tula_wire.retry import backoff_s

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Failure = Literal["not_sent", "lost"]

NOT_PROCESSED: Final = frozenset({429, 503})
"""Statuses by which a server says that it has not processed the request."""
MAYBE_PROCESSED: Final = frozenset({502, 504})
"""Statuses of a gateway that does not know what the server did with the request."""


@dataclass(frozen=True)
class Request:
    """A request, ready to send."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotent: bool = True


@dataclass(frozen=True)
class Answer:
    """An answer; header names are read in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request and the parser of its answer; `parse` raises `TulaError` if the answer is no success."""

    request: Request
    parse: Callable[[Answer], T]

    def __iter__(self) -> Generator[Call[T], T, T]:
        """The call as a flow of one call: `yield from` gives its answer."""
        return (yield self)


Work = Callable[[], None]
"""What would block an event loop: `AsyncClient` does it in a thread."""
Flow = Generator[Call[Any] | float | Work, Any, T]
"""What takes several calls: yields each call and is sent its answer, yields seconds to wait or work to be done, and
returns the result."""


class Question(Protocol[T_co]):
    """A call, or a flow."""

    def __iter__(self) -> Flow[T_co]:
        """The flow."""
        ...


class Blocking:
    """Base of classes whose `Method`s return their results."""


class Awaited:
    """Base of classes whose `Method`s are to be awaited."""


class Method(Generic[P, T]):
    """A method for both kinds of client, written once: sends the call or flow that `build` makes by the `send` of its
    object's client. `first`: what `build` gets first, the object itself (`self`), its `id`, or nothing."""

    def __init__(self, build: Callable[P, Question[T]], first: Literal["", "self", "id"] = "") -> None:
        self.build = build
        self.first = first
        self.functions: dict[type, Callable[..., Any]] = {}

    def __set_name__(self, kind: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, owner: None, kind: type[Blocking]) -> Callable[Concatenate[Any, P], T]: ...

    @overload
    def __get__(self, owner: None, kind: type[Awaited]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]: ...

    @overload
    def __get__(self, owner: Blocking, kind: type[Blocking]) -> Callable[P, T]: ...

    @overload
    def __get__(self, owner: Awaited, kind: type[Awaited]) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, owner: Any, kind: Any) -> Any:
        if kind not in self.functions:
            self.functions[kind] = self._function(kind)
        function = self.functions[kind]
        return function if owner is None else types.MethodType(function, owner)

    def _function(self, kind: type) -> Any:
        """The function that class `kind` has under this name: it takes the object first."""

        def send(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            first = {"": (), "self": (owner,), "id": (getattr(owner, "id", ""),)}[self.first]
            return getattr(owner, "client", owner).send(self.build(*first, *args, **kwargs))

        async def send_awaited(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            return await send(owner, *args, **kwargs)

        function: Any = send_awaited if issubclass(kind, Awaited) else send
        functools.update_wrapper(function, self.build)
        function.__module__, function.__name__ = kind.__module__, self.name
        function.__qualname__ = f"{kind.__qualname__}.{self.name}"
        function.__signature__ = signature = _signature(self.build, bool(self.first))
        annotated = {one.name: one.annotation for one in list(signature.parameters.values())[1:]}
        function.__annotations__ = annotated | {"return": signature.return_annotation}
        return function


def _signature(build: Callable[..., Any], takes_object: bool) -> inspect.Signature:
    """The signature of the method that sends what `build` makes, for notebooks and `help`; annotations are objects."""
    hints = get_type_hints(build)
    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    others = list(inspect.signature(build).parameters.values())[1 if takes_object else 0 :]
    parameters = [owner, *(one.replace(annotation=hints[one.name]) for one in others)]
    return inspect.Signature(parameters, return_annotation=get_args(hints["return"])[-1])


def flow(build: Callable[Concatenate[Any, P], Question[T]]) -> Method[P, T]:
    """Decorates a method, of a class for both kinds of client, that returns a call or is a flow."""
    return Method(cast("Callable[P, Question[T]]", build), "self")


def of_job(build: Callable[Concatenate[str, P], Question[T]]) -> Method[P, T]:
    """A method of a handle: a call or flow whose first argument is the job's id."""
    return Method(cast("Callable[P, Question[T]]", build), "id")


@dataclass(frozen=True)
class Outcome:
    """The result of an attempt: a status, or the failure that left it without one.

    `not_sent`: no connection was made, so the service has seen nothing. `lost`: it may have acted.
    """

    status: int | None = None
    failure: Failure | None = None
    retry_after_s: float | None = None

    def worth_repeating(self, idempotent: bool) -> bool:
        """True if another attempt may succeed and does no harm."""
        if self.failure == "not_sent" or self.status in NOT_PROCESSED:
            return True
        return idempotent and (self.failure == "lost" or self.status in MAYBE_PROCESSED)


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with full jitter (`tula_wire.retry`), bounded in attempts and in seconds of waiting.

    Requests that are not idempotent are repeated only if the service cannot have acted on them.
    """

    max_attempts: int = 5
    base_s: float = 0.2
    cap_s: float = 5.0
    budget_s: float = 30.0

    def wait_s(self, outcome: Outcome, *, attempt: int, waited_s: float, idempotent: bool, dice: float) -> float | None:
        """Seconds to wait before the next attempt, or None to give up.

        `attempt` counts from 1, `waited_s` is the sum of earlier waits, `dice` is uniform in [0, 1).
        """
        if attempt >= self.max_attempts or not outcome.worth_repeating(idempotent):
            return None
        wait = backoff_s(attempt, dice, base_s=self.base_s, cap_s=self.cap_s, asked_s=outcome.retry_after_s)
        return wait if waited_s + wait <= self.budget_s else None


NO_RETRY: Final = RetryPolicy(max_attempts=1)
