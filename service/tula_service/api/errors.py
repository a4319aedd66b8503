"""Translates every exception into an RFC 9457 problem document; no other module builds HTTP error responses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from tula_service import errors
from tula_service.perfmodel.points import ObservationError
from tula_wire import MEDIA_TYPE, FieldError, Problem, ProblemType
from tula_wire.problems import remedy

_LOG = logging.getLogger("tula.service")
_MAX_ERRORS: Final = 20
_MAX_REPORTED: Final = 1_000
"""If more fields than this are invalid, none is named, since a list would take seconds and hundreds of megabytes."""

PROBLEMS: Final[dict[int, tuple[str, str, str]]] = {
    401: (ProblemType.UNAUTHENTICATED, "Not authenticated", "The token is missing, expired, revoked or unknown."),
    403: (ProblemType.FORBIDDEN, "Forbidden", "The token's scope does not cover this route."),
    404: (ProblemType.NOT_FOUND, "Not found", "The object does not exist, or the caller may not see it."),
    409: (ProblemType.CONFLICT, "Conflict", "The object's state does not allow the request; `detail` explains why."),
    413: (ProblemType.TOO_LARGE, "Too large", "The body is too large: send smaller batches."),
    415: (
        ProblemType.UNSUPPORTED_MEDIA,
        "Unsupported media type",
        "The media type or encoding of the body is not supported.",
    ),
    422: (
        ProblemType.INVALID,
        "Invalid input",
        "A field is invalid; `errors` lists each invalid field with its remedy.",
    ),
    429: (ProblemType.TOO_MANY_REQUESTS, "Too many requests", "Too many requests: retry after `Retry-After` seconds."),
    500: (ProblemType.INTERNAL, "Internal error", "The service failed and stored nothing: report the request id."),
    503: (
        ProblemType.UNAVAILABLE,
        "Unavailable",
        "The service or its database is busy: retry after `Retry-After` seconds.",
    ),
}
"""The `type`, title and description of the problem document for each HTTP status."""
_STATUS: Final[dict[type[errors.ServiceError], int]] = {
    errors.InvalidInput: 422,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.TooLarge: 413,
    errors.UnsupportedMedia: 415,
    errors.Busy: 503,
    errors.StoreUnavailable: 503,
    errors.SchemaMismatch: 503,
}
_HTTP: Final[dict[int, tuple[str, str, str]]] = {
    400: (ProblemType.INVALID, "Bad request", "The request cannot be read: check its body."),
    404: (ProblemType.NOT_FOUND, "Not found", "This path does not exist: see /docs for the routes."),
    405: (ProblemType.INVALID, "Method not allowed", "This path does not support this method: see /docs."),
    408: (ProblemType.UNAVAILABLE, "Request time-out", "The body arrived too slowly: send the request again."),
}
"""The problem documents for statuses that the router or `RequestMiddleware` raises."""


def install(app: FastAPI) -> None:
    """Register the application's exception handlers, one for each family of exceptions."""
    for kind in (errors.ServiceError, HTTPException, ObservationError):
        app.add_exception_handler(kind, _on_error)
    for invalid in (RequestValidationError, ValidationError):
        app.add_exception_handler(invalid, _on_validation_error)
    app.add_exception_handler(Exception, _on_bug)


def build_problem(scope: Scope, error: HTTPException | errors.ServiceError) -> Response:
    """Return the problem document for a ServiceError or an HTTPException."""
    if isinstance(error, HTTPException):
        kind, title, detail = _HTTP.get(error.status_code, (ProblemType.INVALID, "Error", str(error.detail)))
        return _problem(scope, error.status_code, detail, kind=kind, title=title, headers=error.headers)
    status = next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
    headers = {}
    if isinstance(error, (errors.Busy, errors.StoreUnavailable)):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, errors.Busy) and error.limited:
        status = 429
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="tula"'
    faults = [] if error.field is None else [FieldError(field=error.field, message=error.message)]
    return _problem(scope, status, error.message, faults=faults, headers=headers)


def _problem(
    scope: Scope,
    status: int,
    detail: str,
    *,
    kind: str = "",
    title: str = "",
    faults: Sequence[FieldError] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a problem document, or an error page for a browser; `field` is the field of the first error."""
    problem = Problem(
        type=kind or PROBLEMS[status][0],
        title=title or PROBLEMS[status][1],
        status=status,
        detail=detail,
        field=faults[0].field if faults else None,
        errors=list(faults),
        request_id=scope.get("tula.request_id"),
    )
    page = scope["app"].state.services.error_page(scope, problem, headers or {})
    return page or Response(problem.model_dump_json(), status, headers, media_type=MEDIA_TYPE)


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, (HTTPException, errors.ServiceError)):
        return build_problem(request.scope, error)
    return build_problem(request.scope, errors.InvalidInput(str(error)))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, (RequestValidationError, ValidationError))
    if isinstance(error, ValidationError) and (count := error.error_count()) > _MAX_REPORTED:
        return _problem(
            request.scope, 422, f"body: {count} fields are invalid; check that this body is meant for this route."
        )
    # Errors contain only the field and the remedy, never the input, since that may contain a secret or NaN.
    faults = [FieldError(field=_dotted(fault["loc"]), message=remedy(fault)) for fault in error.errors()[:_MAX_ERRORS]]
    more = f" ({len(faults) - 1} more in errors)" if len(faults) > 1 else ""
    return _problem(request.scope, 422, f"{faults[0].field}: {faults[0].message}{more}", faults=faults)


async def _on_bug(request: Request, error: Exception) -> Response:
    _LOG.error("Unhandled error.", exc_info=error, extra={"request_id": request.scope.get("tula.request_id")})
    return _problem(
        request.scope, 500, "The service failed to handle this request and stored nothing: report the request id."
    )


def _dotted(location: Sequence[Any]) -> str:
    parts = [str(part) for part in location]
    if parts and parts[0] in ("body", "query", "path", "header"):
        parts = parts[1:]
    return ".".join(parts) or "body"
