"""Prints results of commands, as text or JSON, and connects to the service."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.table import Table

from tula_client._client import Client
from tula_wire import Configuration


def connect() -> Client:
    """A client of the service at `--url` or TULA_URL."""
    return Client()


def set_url(url: str) -> None:
    """Use the service at `url` in this process and in every command that it starts."""
    os.environ["TULA_URL"] = url


def console() -> Console:
    """Standard output; 160 columns wide if it is no terminal, so that tables in a file are not cut."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return Console(width=wide, highlight=False, soft_wrap=False)


def emit(value: Any, human: RenderableType, as_json: bool) -> None:
    """Print `value` as one JSON document, or `human` as text."""
    if as_json:
        print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))
    elif isinstance(human, str):
        print(human)  # a sentence is one line, however long
    else:
        console().print(human)


def note(sentence: str) -> None:
    """Print a message that is no result, on standard error."""
    print(sentence, file=sys.stderr)


def plain(value: Any) -> Any:
    """Wire models and configurations, and collections of them, as JSON values."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Configuration):
        return asdict(value)
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> Table:
    """A plain table; a heading with the prefix `>` aligns its column right, `=` keeps the column on one line."""
    drawn = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        # A narrow terminal wraps cells, except numbers and the first column, which users copy.
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        keep = column.startswith((">", "=")) or (index == 0 and bool(column))
        drawn.add_column(column.lstrip(">="), justify=justify, no_wrap=keep, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return drawn
