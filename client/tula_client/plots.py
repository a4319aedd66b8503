"""Charts that the service specifies, for notebooks and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tula_client._errors import MissingExtraError, TulaError, UsageError

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
