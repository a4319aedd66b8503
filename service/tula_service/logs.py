"""Structured logs: one JSON object a line, with the request's id; secrets never get here, since no header is logged."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any, Final

_FIELDS: Final = ("request_id", "method", "route", "status", "took_ms", "token", "job_id", "run_id")


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, and the known extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback becomes a member of it."""
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _FIELDS if getattr(record, name, None) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def logging_config(level: str) -> dict[str, Any]:
    """For `logging.config.dictConfig`: everything to standard error as JSON, uvicorn's own lines included."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "tula_service.logs.JsonFormatter"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "loggers": {
            "tula": {"handlers": ["stderr"], "level": level.upper(), "propagate": False},
            "uvicorn": {"handlers": ["stderr"], "level": level.upper(), "propagate": False},
        },
        "root": {"handlers": ["stderr"], "level": "WARNING"},
    }
