"""Answers as flat rows (dictionaries) for data frames and files, with the names of the wire; charts as files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import BaseModel

from tula_client._errors import MissingExtraError, TulaError, UsageError
from tula_client.launch.spec import model_in
from tula_wire import Candidate, Configuration, Estimate, Recommendation, TelemetrySeries

Cell = str | int | float | bool | None
Row = dict[str, Cell]
Table = Literal["candidates", "runs", "ledger", "samples", "telemetry", "events"]

TABLES: Final[tuple[Table, ...]] = get_args(Table)


def rows(models: Iterable[BaseModel]) -> list[Row]:
    """A row for each, of the model's fields.

    A configuration gives the columns of its fields and `world_size` and `global_batch_size`, an estimate a column and
    the ends of its interval as `_low` and `_high`, other objects the columns of their fields, a list or a mapping JSON.
    """
    return [_row(type(model), model) for model in models]


def candidate_rows(recommendation: Recommendation) -> list[Row]:
    """Every candidate with its predictions and its role in the answer."""
    return [_row(Candidate, one) | roles(one, recommendation) for one in recommendation.candidates]


def telemetry_rows(series: TelemetrySeries) -> list[Row]:
    """A row for each point of one column of a run."""
    same: Row = {"run_id": series.run_id, "rank": series.rank, "column": series.column}
    points = zip(series.steps, series.values, strict=True)
    return [{**same, "step": step, "value": value} for step, value in points]


def data_frame(rows: list[Row]) -> Any:
    """The rows as a pandas data frame; raises `MissingExtraError` without pandas."""
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("a data frame", "notebook") from None
    return pandas.DataFrame(rows)


def roles(candidate: Candidate, recommendation: Recommendation) -> dict[str, bool]:
    """The role of a candidate in the answer."""

    def is_same(other: Candidate | None) -> bool:
        return other is not None and (other.configuration, other.spot) == (candidate.configuration, candidate.spot)

    return {
        "chosen": is_same(recommendation.chosen),
        "least_time": is_same(recommendation.least_time),
        "least_cost": is_same(recommendation.least_cost),
        "knee": recommendation.knee.found and recommendation.knee.configuration == candidate.configuration,
    }


def _row(kind: type[BaseModel], model: BaseModel | None) -> Row:
    """The columns of `kind`; all empty without a model."""
    row: Row = {}
    for name, field in kind.model_fields.items():
        value = getattr(model, name, None)
        inner = model_in(field.annotation)
        if name == "configuration":
            row |= _configuration(value)
        elif inner is Estimate:
            row |= {name + end: getattr(value, part, None) for end, part in _ESTIMATE}
        elif inner is not None:
            row |= _row(inner, value)
        else:
            row[name] = _cell(value)
    return row


_ESTIMATE: Final = (("", "value"), ("_low", "low"), ("_high", "high"))


def _configuration(value: Configuration | None) -> Row:
    if value is None:
        return dict.fromkeys((*Configuration.__annotations__, "world_size", "global_batch_size"))
    return asdict(value) | {"world_size": value.world_size, "global_batch_size": value.global_batch_size}


def _cell(value: Any) -> Cell:
    if isinstance(value, datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, (str, int, float, bool)) else json.dumps(value)


FORMATS: Final = ("png", "svg", "json")


def altair_chart(spec: dict[str, Any]) -> Any:
    """An Altair chart of a Vega-Lite specification; raises `MissingExtraError` without Altair."""
    try:
        import altair
    except ImportError:
        raise MissingExtraError("a plot in a notebook", "notebook") from None
    return altair.Chart.from_dict(spec)


def save(spec: dict[str, Any], path: Path, *, scale: float = 2.0) -> None:
    """Write a Vega-Lite specification as PNG, SVG or JSON, according to the suffix of `path`.

    `scale` is device pixels per chart pixel of a PNG. Rendering needs no network. Raises `UsageError` for another
    suffix, or a path that cannot be written, `MissingExtraError` without the renderer.
    """
    kind = path.suffix.lower().lstrip(".")
    if kind not in FORMATS:
        raise UsageError(f"--output: {path.name!r} must end in one of {', '.join('.' + known for known in FORMATS)}")
    content = json.dumps(spec, indent=1).encode() if kind == "json" else _render(spec, kind, scale)
    write_file(path, content)


def write_file(path: Path, content: bytes) -> None:
    """Write a file that the user named; raises `UsageError` if it cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def _render(spec: dict[str, Any], kind: str, scale: float) -> bytes:
    try:
        import vl_convert
    except ImportError:
        raise MissingExtraError(f"a chart as {kind.upper()}", "notebook") from None
    try:
        if kind == "png":
            return bytes(vl_convert.vegalite_to_png(json.dumps(spec), scale=scale))
        return str(vl_convert.vegalite_to_svg(json.dumps(spec))).encode()
    except ValueError as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else "unknown"
        raise TulaError(f"the chart could not be drawn ({first}): save it as .json and look at it") from None
