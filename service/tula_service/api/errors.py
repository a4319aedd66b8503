"""Translates every exception into an RFC 9457 problem document: the only place where exceptions become HTTP."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from tula_service import errors
from tula_service.perfmodel.points import ObservationError
from tula_wire import MEDIA_TYPE, FieldError, Problem, ProblemType
from tula_wire.remedies import remedy

_LOG = logging.getLogger("tula.service")
CHALLENGE = 'Bearer realm="tula", Basic realm="tula", charset="UTF-8"'
"""A browser asks for a password (the token) on Basic; everything else sends Bearer."""

_MAX_ERRORS = 20
_STATUS: Mapping[type[errors.ServiceError], tuple[int, str, str]] = {
    errors.InvalidInput: (422, ProblemType.INVALID, "Invalid input"),
    errors.NotFound: (404, ProblemType.NOT_FOUND, "Not found"),
    errors.Conflict: (409, ProblemType.CONFLICT, "Conflict"),
    errors.Unauthenticated: (401, ProblemType.UNAUTHENTICATED, "Not authenticated"),
    errors.Forbidden: (403, ProblemType.FORBIDDEN, "Forbidden"),
    errors.TooLarge: (413, ProblemType.TOO_LARGE, "Too large"),
    errors.UnsupportedMedia: (415, ProblemType.UNSUPPORTED_MEDIA, "Unsupported media type"),
    errors.Busy: (503, ProblemType.UNAVAILABLE, "Unavailable"),
    errors.StoreUnavailable: (503, ProblemType.UNAVAILABLE, "Unavailable"),
    errors.SchemaMismatch: (503, ProblemType.UNAVAILABLE, "Unavailable"),
}
_HTTP: Mapping[int, tuple[str, str, str]] = {
    400: (ProblemType.INVALID, "Bad request", "The request cannot be read: check its body."),
    404: (ProblemType.NOT_FOUND, "Not found", "This path does not exist: see /docs for the routes."),
    405: (ProblemType.INVALID, "Method not allowed", "This path does not take this method: see /docs."),
    408: (ProblemType.UNAVAILABLE, "Request time-out", "The body came too slowly: send it again in one piece."),
}


def install(app: FastAPI) -> None:
    """Register one handler for each family of exceptions."""
    app.add_exception_handler(errors.ServiceError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ValidationError, _on_validation_error)
    app.add_exception_handler(ObservationError, _on_observation_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_bug)


def _problem(
    scope: Scope,
    status: int,
    kind: str,
    title: str,
    detail: str,
    *,
    faults: Sequence[FieldError] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A problem document as a response; it names the first fault's field."""
    problem = Problem(
        type=kind,
        title=title,
        status=status,
        detail=detail,
        field=faults[0].field if faults else None,
        errors=list(faults),
        request_id=scope.get("tula.request_id"),
    )
    return Response(problem.model_dump_json(), status, headers, media_type=MEDIA_TYPE)


def problem_of(scope: Scope, error: HTTPException | errors.ServiceError) -> Response:
    """The problem document of an error of this service, or of a status that a router or `Admission` raises."""
    if isinstance(error, errors.ServiceError):
        return _service_problem(scope, error)
    kind, title, detail = _HTTP.get(error.status_code, (ProblemType.INVALID, "Error", str(error.detail)))
    return _problem(scope, error.status_code, kind, title, detail, headers=error.headers)


def field_errors(found: Sequence[Mapping[str, Any]]) -> list[FieldError]:
    """Pydantic's errors as field and remedy; never quotes the input, which may hold a secret or NaN."""
    return [
        FieldError(field=_dotted(error.get("loc", ())), message=remedy(error)) for error in list(found)[:_MAX_ERRORS]
    ]


def _service_problem(scope: Scope, error: errors.ServiceError) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, errors.Busy) and error.limited:
        status, kind, title = 429, ProblemType.TOO_MANY_REQUESTS, "Too many requests"
    else:
        status, kind, title = next(_STATUS[known] for known in type(error).__mro__ if known in _STATUS)
    if isinstance(error, (errors.Busy, errors.StoreUnavailable)):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if status == 401:
        headers["WWW-Authenticate"] = CHALLENGE
    faults = [] if error.field is None else [FieldError(field=error.field, message=error.message)]
    return _problem(scope, status, kind, title, error.message, faults=faults, headers=headers)


def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, (RequestValidationError, ValidationError))
    faults = field_errors(error.errors())
    first = faults[0]
    more = f" ({len(faults) - 1} more in errors)" if len(faults) > 1 else ""
    detail = f"{first.field}: {first.message}{more}"
    return _problem(request.scope, 422, ProblemType.INVALID, "Invalid input", detail, faults=faults)


def _on_observation_error(request: Request, error: Exception) -> Response:
    return _problem(request.scope, 422, ProblemType.INVALID, "Invalid input", str(error))


def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, (HTTPException, errors.ServiceError))
    return problem_of(request.scope, error)


def _on_bug(request: Request, error: Exception) -> Response:
    _LOG.error("unhandled error", exc_info=error, extra={"request_id": request.scope.get("tula.request_id")})
    detail = "The service failed on this request and stored nothing. Report the request id."
    return _problem(request.scope, 500, ProblemType.INTERNAL, "Internal error", detail)


def _dotted(location: Sequence[Any]) -> str:
    parts = [str(part) for part in location]
    if parts and parts[0] in ("body", "query", "path", "header"):
        parts = parts[1:]
    return ".".join(parts) or "body"
