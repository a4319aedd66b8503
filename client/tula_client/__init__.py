"""Tula's client library: requests recommendations from a service, sends measurements to it, and follows jobs."""

from __future__ import annotations

from tula_client._calls import Scaling
from tula_client._client import AsyncClient, AsyncJobHandle, Client, JobHandle, ProfileRun, recommend
from tula_client._errors import (
    ConflictError,
    ForbiddenError,
    InternalServiceError,
    InvalidInputError,
    MissingExtraError,
    NotFoundError,
    ProblemError,
    ServiceUnavailableError,
    ServiceUnreachableError,
    TooLargeError,
    TooManyRequestsError,
    TulaError,
    UnauthenticatedError,
    UnexpectedAnswerError,
    UnsupportedMediaError,
)
from tula_client._request import NO_RETRY, RetryPolicy
from tula_client._schedule import write_schedule
from tula_client._settings import DEFAULT_URL

__all__ = [
    "DEFAULT_URL",
    "NO_RETRY",
    "AsyncClient",
    "AsyncJobHandle",
    "Client",
    "ConflictError",
    "ForbiddenError",
    "InternalServiceError",
    "InvalidInputError",
    "JobHandle",
    "MissingExtraError",
    "NotFoundError",
    "ProblemError",
    "ProfileRun",
    "RetryPolicy",
    "Scaling",
    "ServiceUnavailableError",
    "ServiceUnreachableError",
    "TooLargeError",
    "TooManyRequestsError",
    "TulaError",
    "UnauthenticatedError",
    "UnexpectedAnswerError",
    "UnsupportedMediaError",
    "recommend",
    "write_schedule",
]
