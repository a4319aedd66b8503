"""Tests that the reference of `job.toml` lists exactly the fields, types and defaults that the wire models accept."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tula_client._spec import load_spec, model_in
from tula_wire import JobSpec

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("\n## job.toml\n")[2].partition("\n## ")[0]
UNITS = {
    "_s": "s",
    "_seconds": "s",
    "bytes": "bytes",
    "_usd": "USD",
    "usd_per_node_hour": "USD per node-hour",
    "usd_per_gb_hour": "USD per GB-hour",
    "_gbps": "Gbit/s",
    "_nodes": "nodes",
    "_batch_size": "examples",
}
"""What the end of a name says of its unit, or a part of it."""
MAX_PRINTED = 100_000
"""Bounds above this only keep numbers from overflowing."""


def expected() -> Iterator[tuple[str, str, str]]:
    """Yield the (field, type, default) of every plain value, as the table should show them."""
    schema = JobSpec.model_json_schema()
    yield from _of(schema, schema["$defs"], "")


def _of(table: dict[str, Any], kinds: dict[str, Any], path: str) -> Iterator[tuple[str, str, str]]:
    for name, field in table["properties"].items():
        (field_, *_) = [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]
        inner = field_.get("items", field_)
        if "$ref" in inner:
            yield from _of(kinds[inner["$ref"].rpartition("/")[2]], kinds, f"{path}{name}.")
        else:
            needed = name in table.get("required", [])
            default = field.get("default")
            shown = "" if default in (None, {}) else _text(default)
            yield f"{path}{name}", _type(field_), "needed" if needed else shown


def _text(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else f"{default}"


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{one}`" for one in field["enum"])
    least, above, most = field.get("minimum"), field.get("exclusiveMinimum"), field.get("maximum")
    bounds = f" above {above}" if above is not None else "" if least is None else f" from {least:g}"
    if most is not None and most <= MAX_PRINTED:
        bounds += f" to {most}"
    words = {"string": "text", "boolean": "`true` or `false`", "object": "table", "array": "list"}
    return words.get(field["type"], field["type"]) + bounds


def rows() -> dict[str, list[str]]:
    """Return the cells of each row of the page's table, by field."""
    lines = [line for line in SECTION.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({name for name, *_ in cells}) == len(cells)
    return {name.strip("`"): rest for name, *rest in cells}


def test_the_table_says_every_field_with_its_type_and_default() -> None:
    found = [(name, kind, default) for name, (kind, default, *_) in rows().items()]
    assert found == list(expected())


def test_every_field_is_explained_with_its_unit() -> None:
    for name, (_, _, unit, meaning) in rows().items():
        assert meaning, name
        said = {of for end, of in UNITS.items() if name.endswith(end) or (end == "bytes" and end in name)}
        assert unit in said if said else not re.search(r"usd|bytes", unit), f"{name}: {unit!r}, not {said}"


def fields_of(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of a model and of the models in it."""
    for name, field in model.model_fields.items():
        yield f"{path}{name}"
        if (inner := model_in(field.annotation)) is not None:
            yield from fields_of(inner, f"{path}{name}.")


def test_the_walk_finds_what_the_models_hold() -> None:
    leaves = {name for name in fields_of(JobSpec) if name.partition(".")[0] not in TABLES or "." in name}
    assert {name for name, *_ in expected()} == leaves - {"cluster.price", "cluster.price.spot"}


TABLES = {name for name, field in JobSpec.model_fields.items() if model_in(field.annotation)}


@pytest.mark.parametrize("block", re.findall(r"^```toml\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL))
def test_the_example_uses_every_table_and_is_accepted(block: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(block)
    assert len(load_spec(path).cluster) == 2
    assert set(tomllib.loads(block)) >= TABLES
