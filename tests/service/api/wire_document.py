"""Sends the requests of `docs/wire.md` to a real service, in order; as a command, updates the responses on the page."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support.forked import Server
from benchmarks.support.server import migrate

DOCUMENT = Path(__file__).parents[3] / "docs" / "wire.md"
ROUTE = re.compile(r"^### `([A-Z]+) ([^`]+)`$", re.MULTILINE)
_EXCHANGE = re.compile(r"```http\n(?P<request>.*?)```(?:\n\n```(?P<kind>json|text)\n(?P<answer>.*?)```)?", re.DOTALL)
_LEFT_OUT = {
    "candidates": "… as chosen",
    "frontier": "… configurations",
    "menu": "… points of the frontier",
    "plan": "… as run of runs:claim",
    "runs": "… as run of runs:claim",
    "runner_up": "… as chosen",
    "least_time": "… as chosen",
    "least_cost": "… as chosen",
    "balanced": "… as chosen",
    "recommendation": "… as GET /v1/jobs/{job_id}/recommendation",
    "job": "… as GET /v1/jobs/{job_id}",
    "spec": "… as registered, with every default",
    "encoding": "…",
    "layer": "…",
    "datasets": "…",
    "data": "…",
    "config": "…",
    "transform": "…",
}
_WIDTH = 112


@dataclass(frozen=True)
class Exchange:
    """One request of the document with the service's response; `documented` is the response in the document."""

    request: str
    kind: str | None
    documented: str
    status: int
    actual: str
    span: tuple[int, int]


def exchanges(text: str) -> Iterator[Exchange]:
    """Send every request of the document to a new service, with the ids from earlier responses filled in."""
    with tempfile.TemporaryDirectory() as folder:
        database = str(Path(folder) / "tula.db")
        migrate(database)
        with Server(database) as server, httpx.Client(base_url=server.url, timeout=30) as client:
            names: dict[str, str] = {}
            for found in _EXCHANGE.finditer(text):
                status, answer = _send(client, found["request"], names)
                kind = found["kind"]
                span = found.span("answer") if kind is not None else (found.end(), found.end())
                yield Exchange(found["request"], kind, found["answer"] or "", status, answer, span)


def shortened(value: Any, key: str = "") -> Any:
    """Return a response as the document prints it: the first entry of each list, with repeated objects abbreviated."""
    if key in _LEFT_OUT and isinstance(value, (dict, list)):
        return _LEFT_OUT[key]
    if isinstance(value, dict):
        return {name: shortened(inner, name) for name, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [shortened(value[0]), *(["…"] if len(value) > 1 else [])]
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value


def shape(value: Any) -> Any:
    """Return the part of a response that the document must match: the names of all fields, at every depth."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


def _send(client: httpx.Client, request: str, names: dict[str, str]) -> tuple[int, str]:
    for name, value in names.items():
        request = request.replace("{" + name + "}", value)
    head, _, body = request.partition("\n\n")
    first, *lines = head.strip().splitlines()
    method, target = first.split(" ", 1)
    headers = dict(line.split(": ", 1) for line in lines)
    content = body.strip().encode() or None
    if content is not None:
        headers["Content-Type"] = "application/json"
    with client.stream(method, target, headers=headers, content=content) as response:
        kind = response.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            lines = []
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 6:
                    break
            return response.status_code, "\n".join(lines)
        answer = response.read().decode()
    if "json" in kind:
        _learn(json.loads(answer), method, target, names)
    return response.status_code, answer


def _learn(answer: Any, method: str, target: str, names: dict[str, str]) -> None:
    if method == "POST" and target == "/v1/jobs" and "job" in answer:
        names["job_id"] = answer["job"]["id"]
    if target.endswith("runs:claim") and answer.get("run"):
        names["run_id"] = answer["run"]["id"]
    if target == "/v1/tokens" and method == "POST":
        names |= {"secret": answer["secret"], "token_id": answer["token"]["id"]}


def _printed(value: Any, indent: int = 0) -> str:
    """Return JSON in which every object and list that fits is on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + indent <= _WIDTH or not isinstance(value, (dict, list)) or not value:
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        rows = [f"{pad}{json.dumps(name)}: {_printed(inner, indent + 2)}" for name, inner in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    rows = [pad + _printed(inner, indent + 2) for inner in value]
    return "[\n" + ",\n".join(rows) + "\n" + " " * indent + "]"


def main() -> None:
    """Write the responses of a real service into the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    pieces, end = [], 0
    for exchange in exchanges(text):
        if exchange.kind is None:
            continue
        if exchange.kind == "json":
            body = _printed(shortened(json.loads(exchange.actual))) + "\n"
        else:
            body = "\n".join([*exchange.actual.splitlines()[:6], "…"]) + "\n"
        body = re.sub(r'"secret": "[^"]+"', '"secret": "tula_…"', body)
        pieces += [text[end : exchange.span[0]], body]
        end = exchange.span[1]
        sys.stdout.write(f"{exchange.status} {exchange.request.splitlines()[0]}\n")
    DOCUMENT.write_text("".join([*pieces, text[end:]]), encoding="utf-8")


if __name__ == "__main__":
    main()
