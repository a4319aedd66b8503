"""Tests the service's log: JSON for programs, text on a terminal, and no control characters in either."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from tula_service.logs import JsonFormatter, TextFormatter, logging_config


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("tula.access", logging.WARNING, "file.py", 1, message, (), None)
    made.__dict__.update(fields)
    return made


@pytest.mark.parametrize(
    ("wanted", "terminal", "chosen"),
    [("auto", True, "text"), ("auto", False, "json"), ("json", True, "json"), ("text", False, "text")],
)
def test_a_terminal_gets_text_unless_another_format_is_wanted(wanted: str, terminal: bool, chosen: str) -> None:
    config = logging_config("info", wanted, terminal=terminal)
    assert config["handlers"]["stderr"]["formatter"] == chosen


def test_both_formats_have_the_fields_of_a_request() -> None:
    one = record("slow", route="/v1/jobs", took_ms=1200, password="secret")
    plain = json.loads(JsonFormatter().format(one))
    assert (plain["message"], plain["level"], plain["route"], plain["took_ms"]) == ("slow", "warning", "/v1/jobs", 1200)
    text = TextFormatter().format(one)
    assert text.endswith("warning slow route=/v1/jobs took_ms=1200")
    assert "secret" not in text + json.dumps(plain)


def test_a_text_line_holds_no_control_character_and_a_traceback_keeps_its_lines() -> None:
    assert "\x1b" not in TextFormatter().format(record("a", request_id="\x1b[2J"))
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        one = record("failed")
        one.exc_info = sys.exc_info()
    lines = TextFormatter().format(one).split("\n")
    assert lines[1].startswith("Traceback")
    assert lines[-1].startswith("ValueError: ")
    assert "\x1b" not in "".join(lines)
