"""Removes from untrusted text the characters that control a terminal, forge a log line, or reorder the text."""

from __future__ import annotations

import re
from typing import Final

UNPRINTABLE: Final = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""Control characters (C0, C1), line separators and bidirectional controls, for use in a regular expression's class."""

_SPACES = re.compile(r"[\t\n\r]+")
_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_REST = re.compile(f"[{UNPRINTABLE}\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` on one line, with U+FFFD for unprintable characters, and spaces for tabs and line breaks."""
    return _REST.sub("\ufffd", _SPACES.sub(" ", text))


def printable_lines(text: str) -> str:
    """Return the lines of `text` without terminal colours and unprintable characters.

    If a line was overwritten, for example by a progress bar, only the final text of the line is returned.
    """
    lines = _COLOURS.sub("", text).split("\n")
    return "\n".join(printable(line.rstrip("\r").rpartition("\r")[2]) for line in lines)
