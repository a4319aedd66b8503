"""Formats logs as JSON or text, with the request id; headers are never logged, since they may contain secrets."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any, Final

from tula_wire.text import printable

_FIELDS: Final = ("request_id", "method", "route", "status", "took_ms", "token", "job_id", "run_id")


class JsonFormatter(logging.Formatter):
    """Formats each log record as a JSON object with time, level, logger, message and the extra fields in `_FIELDS`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON; any traceback is in the member `exception`."""
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _details(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Formats each log record as text with local time, level, message and the extra fields in `_FIELDS`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line, followed by the lines of any traceback, without control characters."""
        fields = "".join(f" {name}={value}" for name, value in _details(record).items())
        lines = [f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():7} {record.getMessage()}{fields}"]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        return "\n".join(map(printable, lines))


def _details(record: logging.LogRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _FIELDS if getattr(record, name, None) is not None}


def logging_config(level: str, style: str, *, terminal: bool) -> dict[str, Any]:
    """Return a `logging.config.dictConfig` configuration that sends all logs, including uvicorn's, to standard error.

    `style` is json, text, or auto, which means text if standard error is a `terminal` and json otherwise.
    """
    text = style == "text" or (style == "auto" and terminal)
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "json": {"()": "tula_service.logs.JsonFormatter"},
            "text": {"()": "tula_service.logs.TextFormatter"},
        },
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "text" if text else "json"}},
        "loggers": {
            "tula": {"handlers": ["stderr"], "level": level.upper(), "propagate": False},
            "uvicorn": {"handlers": ["stderr"], "level": level.upper(), "propagate": False},
        },
        "root": {"handlers": ["stderr"], "level": "WARNING"},
    }
