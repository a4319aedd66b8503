"""Serves the OpenAPI document (`/openapi.json`) and Swagger UI (`/docs`), which loads no files from other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, get_args, get_origin

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

import tula_wire
from tula_service.api.auth import UNAUTHENTICATED_ROUTES
from tula_service.api.errors import PROBLEMS
from tula_wire import MEDIA_TYPE, access, bounds, jobs, samples, scaling

router = APIRouter(tags=["operations"], include_in_schema=False)

_REFERENCE: Final = "#/components/schemas/{model}"
_CHOICES: Final = {
    get_args(kind): name
    for module in (access, bounds, jobs, samples, scaling)
    for name, kind in vars(module).items()
    if get_origin(kind) is Literal
}
"""The named `Literal` types, keyed by their values.

Each type becomes one schema; otherwise, generated clients would have a separate type for each field.
"""
TAGS: Final = {
    "jobs": "Register, list, read, change and delete jobs.",
    "runs": "Lease profiling runs, register training runs, and report how runs end.",
    "samples": "Step times and memory use of runs, with one row per step and rank.",
    "telemetry": "Time series of a run's metrics, in columns.",
    "recommendation": "Recommended configurations, predictions, and the outcomes of past recommendations.",
    "scaling": "Gradient-scaling values of a job.",
    "fabrics": "Probes that measure the links between ranks.",
    "events": "Changes to a job, as server-sent events.",
    "charts": "Charts as Vega-Lite.",
    "access": "Tokens and projects.",
    "operations": "Probes and metrics.",
}
"""The description of each tag."""

_PATH_PARAMETERS: Final = {
    "job_id": "Id of the job.",
    "run_id": "Id of the run.",
    "token_id": "Id of the token.",
    "name": "Name of the chart.",
}
EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "JobSpec": {
        "name": "resnet",
        "model": {"name": "resnet50"},
        "dataset": {"size": 50_000},
        "epochs": 90,
        "cluster": [{"max_nodes": 4, "price": {"usd_per_node_hour": 3.06}}],
        "batch": {"min_local_batch_size": 32, "max_local_batch_size": 256},
    },
    "JobPatch": {"objective": "cost", "limits": {"deadline_s": 86_400}},
    "ClaimRequest": {"holder": "node-1:4711", "lease_s": 120},
    "RunCreate": {"kind": "train", "configuration": {"num_nodes": 2, "local_batch_size": 64}},
    "RunPatch": {"state": "succeeded"},
    "SampleBatch": {
        "rank": 0,
        "boot_id": "5f2c",
        "sequence": [0, 1, 2],
        "step": [0, 1, 2],
        "step_time_s": [0.114, 0.112, 0.113],
    },
    "TelemetryChunk": {
        "rank": 0,
        "boot_id": "5f2c",
        "sequence": 0,
        "steps": [0, 1, 2],
        "columns": {"loss": [2.31, 2.28, 2.24]},
    },
    "ScalingPatch": {"s_max": 4.0},
    "FabricProbe": {
        "backend": "nccl",
        "num_nodes": 2,
        "ranks_per_node": 1,
        "all_ranks": [
            {"size_bytes": 1024, "time_s": 5.2e-5, "relative_sd": 0.04, "repeats": 20},
            {"size_bytes": 1_048_576, "time_s": 2.3e-4, "relative_sd": 0.03, "repeats": 20},
            {"size_bytes": 268_435_456, "time_s": 0.0441, "relative_sd": 0.01, "repeats": 12},
        ],
    },
    "TokenCreate": {"name": "laptop", "scope": "user", "project": "default"},
    "ProjectCreate": {"name": "vision"},
}
"""One valid request body for each model."""

_PAGE = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Tula API</title>"
    '<meta name=viewport content="width=device-width">'
    '<link rel=icon href="/static/icon.svg" type="image/svg+xml">'
)
_SWAGGER = (
    f'{_PAGE}<link rel=stylesheet href="/static/swagger-ui.css"><link rel=stylesheet href="/static/docs.css">'
    '<p><a href="/">Jobs of this service</a></p><div id=swagger-ui></div>'
    '<script src="/static/swagger-ui-bundle.js"></script><script src="/static/docs.js"></script></html>'
)


@router.get("/openapi.json")
def get_openapi_document(request: Request) -> dict[str, Any]:
    """Return the OpenAPI document, which describes every route."""
    return document(request.app)


@router.get("/docs", response_class=HTMLResponse)
def get_docs() -> HTMLResponse:
    """Return a page that shows the routes in Swagger UI, which can also send requests."""
    return HTMLResponse(_SWAGGER)


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, including the schemas `Problem` and `Event`, which no route declares."""
    if app.openapi_schema is None:
        tags = [{"name": name, "description": text} for name, text in TAGS.items()]
        made = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            routes=app.routes,
            tags=tags,
            separate_input_output_schemas=False,
        )
        components = made.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for name in ("Problem", "Event"):
            schema = getattr(tula_wire, name).model_json_schema(ref_template=_REFERENCE)
            schemas.update(schema.pop("$defs", {}))
            schemas[name] = schema
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for name, example in EXAMPLES.items():
            schemas[name]["examples"] = [example]
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"token": []}]
        for path, operations in made["paths"].items():
            for method, operation in operations.items():
                if is_open := (method.upper(), path) in UNAUTHENTICATED_ROUTES:
                    operation["security"] = []
                operation["responses"].pop("422", None)
                operation["responses"] |= dict(_error_answers(operation, is_open=is_open))
                for parameter in operation.get("parameters", []):
                    if parameter["in"] == "path":
                        parameter["description"] = _PATH_PARAMETERS[parameter["name"]]
        app.openapi_schema = _with_named_choices(made)
        schemas = app.openapi_schema["components"]["schemas"]
        schemas |= {name: {"type": "string", "enum": list(values)} for values, name in _CHOICES.items()}
    return app.openapi_schema


def _with_named_choices(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_named_choices(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    name = _CHOICES.get(tuple(schema.get("enum", ())))
    if name is not None:
        return {"$ref": _REFERENCE.format(model=name)} | {
            key: value for key, value in schema.items() if key not in ("enum", "type")
        }
    return {key: _with_named_choices(value) for key, value in schema.items()}


def _error_answers(operation: dict[str, Any], *, is_open: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the status and description of each error response of an operation.

    The ranges 4XX and 5XX cover errors from a proxy or the HTTP parser.
    """
    possible = {500, 503} if is_open else {401, 403, 429, 500, 503}
    if "requestBody" in operation:
        possible |= {409, 413, 415, 422}
    if any(parameter["in"] == "path" for parameter in operation.get("parameters", [])):
        possible |= {404, 409}
    if operation.get("parameters"):
        possible.add(422)
    content = {MEDIA_TYPE: {"schema": {"$ref": _REFERENCE.format(model="Problem")}}}
    for status in sorted(possible):
        kind, _, text = PROBLEMS[status]
        yield str(status), {"description": f"`{kind}`: {text}", "content": content}
    for range_ in ("4XX", "5XX"):
        yield range_, {"description": "Any other error, as a problem document.", "content": content}
