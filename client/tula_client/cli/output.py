"""Defines options that several commands share, and functions that print results as text or JSON."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TextIO, cast

import typer
from pydantic import BaseModel
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tula_wire import Configuration, Estimate
from tula_wire.format import NOTHING, count, duration, energy, mass, money, option, size
from tula_wire.text import UNPRINTABLE, printable

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's id or name.")]


WORDS_WIDTH = 16
"""The minimum width, in characters, of a table cell that has several words."""


def seconds(text: str) -> float:
    """Parse a number of seconds from the command line. Raises `typer.BadParameter` if the text is not such a number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise typer.BadParameter(f"{text!r} is not a number of seconds: for example, write two hours as 7200")
    return number


BRIEF = "nodes, batch (local)"
"""The heading of a column that shows `brief` configurations."""
_UNPRINTABLE_IN_JSON = re.compile(f"(?!\n)[{UNPRINTABLE}]")


class _Terminal(Console):
    """A console that writes no control characters except its own style codes, since it may print untrusted text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            clean = text if control or text.isprintable() else "\n".join(map(printable, text.split("\n")))
            yield Segment(clean, style, control)


def console(file: TextIO | None = None) -> Console:
    """Return a console that writes to `file`, by default to standard output.

    If standard output is not a terminal, the console is 160 columns wide, so that tables fit.
    """
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return _Terminal(file=file, width=wide, highlight=False, soft_wrap=False)


class _LossyStream:
    """A standard output stream whose writes never fail; if the terminal is closed or the disk is full, text is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` if the stream accepts it, and return the length of `text` in any case."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, ignoring errors."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting_console() -> Console:
    """Return a console for a command that supervises processes and must survive the loss of its terminal or file."""
    return console(cast("TextIO", _LossyStream(sys.stdout)))


def emit(value: Any, human: RenderableType, as_json: bool) -> None:
    """Print `value` as one JSON document, or `human` as text."""
    if as_json:
        print(escaped(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)))
    elif isinstance(human, str):
        print(printable(human))  # a sentence stays on one line, however long it is
    else:
        console().print(human)


def escaped(document: str) -> str:
    """Return a JSON document with all terminal control characters escaped; they can occur only in strings."""
    return _UNPRINTABLE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


def _plain(value: BaseModel | Configuration) -> dict[str, Any]:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value.as_json()


def facts(rows: Sequence[Sequence[str]]) -> Table:
    """Return a table with two columns, names and values, and no heading."""
    drawn = table(["", ""], rows)
    drawn.show_header = False
    return drawn


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a plain table.

    A heading that starts with `>` right-aligns its column, and one that starts with `=` keeps its cells on one line.
    """
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        # In a narrow terminal all cells wrap except numbers and those in the first column, which users copy.
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        keep = column.startswith((">", "=")) or (index == 0 and bool(column))
        drawn.add_column(column.lstrip(">="), justify=justify, no_wrap=keep, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return drawn


class Narrowing:
    """A table that omits whole columns, instead of truncating numbers, if the terminal is too narrow.

    spare: headings of the columns that may be omitted, the least important first. The first column, numbers and
    columns marked `=` need their full width. Any other column needs the width of its longest word, and at least
    WORDS_WIDTH unless all its cells are shorter.
    """

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str]) -> None:
        self.columns, self.rows, self.spare = columns, rows, spare

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        left, gone = list(range(len(self.columns))), []
        for name in self.spare:
            if self._width(left) <= options.max_width:
                break
            index = self.columns.index(name)
            left.remove(index)
            gone.append(name.lstrip(">="))
        yield table([self.columns[i] for i in left], [[row[i] for i in left] for row in self.rows])
        if gone:
            yield Text(f"The terminal is too narrow for {', '.join(gone)}: widen it, or use --json.", style="dim")

    def _width(self, indices: Sequence[int]) -> int:
        return sum(self._needed(index) + 2 for index in indices) - 2

    def _needed(self, index: int) -> int:
        cells = [self.columns[index].lstrip(">="), *(row[index] for row in self.rows)]
        whole = max(map(cell_len, cells))
        if index == 0 or self.columns[index].startswith((">", "=")):
            return whole
        word = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
        return max(word, min(whole, WORDS_WIDTH))


def saving(value: float) -> str:
    """Return text that compares one time with another, given the share saved (negative if the first time is longer)."""
    if abs(value) < 0.005:
        return "the same time as"
    if value > 0:
        return f"{value * 100:.0f} % less time than"
    return f"{1 - value:.3g} times as long as"


def estimate(value: Estimate | None, unit: str = "s") -> str:
    """Return a prediction and its interval as text."""
    if value is None:
        return NOTHING
    formats = {"s": duration, "usd": money, "bytes": size, "count": count, "kwh": energy, "gco2": mass}
    show = formats[unit]
    return f"{show(value.value)} ({show(value.low)} to {show(value.high)})"


def brief(value: Configuration | None) -> str:
    """Return a configuration as text that is short enough for one line of a table cell."""
    if value is None:
        return NOTHING
    kind = f" {value.instance_type}" if value.instance_type != "default" else ""
    nodes = f"{value.num_nodes}{kind}" + (f" x {value.ranks_per_node} ranks" if value.ranks_per_node != 1 else "")
    accumulation = f" x {value.grad_accum_steps}" if value.grad_accum_steps != 1 else ""
    chosen = "".join(f", {option(name, word)}" for name, word in value.options)
    return f"{nodes}, {value.global_batch_size} ({value.local_batch_size}{accumulation}){chosen}"
