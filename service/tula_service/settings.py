"""Every setting of the service; read from the environment once, at start, and never at import."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "TULA_"


class SettingsError(ValueError):
    """A setting with an invalid value; the message names it and says what to give."""


def _setting(default: Any, about: str, *, least: float | None = None, most: float | None = None) -> Any:
    return field(default=default, metadata={"about": about, "least": least, "most": most})


@dataclass(frozen=True)
class Settings:
    """One field per setting; the environment variable is `TULA_` and the field's name in capitals."""

    database: str = _setting("tula.db", "SQLite file, or postgresql+psycopg:// URL.")
    host: str = _setting("127.0.0.1", "Address to listen on; any but loopback needs a token to exist first.")
    port: int = _setting(8321, "Port to listen on; 0 takes a free one.", least=0, most=65_535)
    workers: int = _setting(1, "Processes that serve; they share the database and metrics.", least=1)
    threads: int = _setting(16, "Requests that a worker handles at once, and its database connections.", least=2)
    max_in_flight: int = _setting(
        256, "Requests of agents that a worker holds at once, and 3/4 as many others; more get Retry-After.", least=1
    )
    max_body_bytes: int = _setting(8 * 2**20, "Largest body as sent.", least=1024)
    requests_per_minute: int = _setting(6_000, "Requests of one token to one worker, ingest excluded.", least=1)
    ingest_per_minute: int = _setting(240_000, "Samples and telemetry requests of one token to one worker.", least=1)
    shutdown_s: int = _setting(20, "How long accepted requests may take to finish at shutdown.", least=1)
    retention_days: float = _setting(90.0, "Age at which `tula prune` deletes archived jobs.", least=0)
    log_level: str = _setting("info", "debug, info, warning or error; debug also logs every ingest request.")
    log_format: str = _setting("auto", "json or text; auto: text on a terminal, else json.")
    trace: bool = _setting(False, "OpenTelemetry traces; needs the extra `otel` and its usual OTEL_ variables.")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read `TULA_*`. Raises SettingsError for a value of the wrong kind, below its least or above its most."""
        given = {
            item.name: _parsed(item, environment[PREFIX + item.name.upper()])
            for item in dataclasses.fields(cls)
            if environment.get(PREFIX + item.name.upper(), "") != ""
        }
        return cls(**given)

    def __post_init__(self) -> None:
        """Check every value. Raises SettingsError."""
        for item in dataclasses.fields(self):
            least, most = item.metadata["least"], item.metadata["most"]
            if least is not None and not getattr(self, item.name) >= least:
                raise SettingsError(f"{PREFIX}{item.name.upper()} must be at least {least}: set it higher.")
            if most is not None and not getattr(self, item.name) <= most:
                raise SettingsError(f"{PREFIX}{item.name.upper()} must be at most {most}: set it lower.")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise SettingsError(f"{PREFIX}LOG_LEVEL is {self.log_level!r}: use debug, info, warning or error.")
        if self.log_format not in ("auto", "json", "text"):
            raise SettingsError(f"{PREFIX}LOG_FORMAT is {self.log_format!r}: use json, text or auto.")

    def to_environment(self) -> dict[str, str]:
        """The variables from which `from_environment` reads the same settings: how workers get them."""
        return {PREFIX + item.name.upper(): _as_text(getattr(self, item.name)) for item in dataclasses.fields(self)}

    @property
    def max_ordinary_in_flight(self) -> int:
        """Requests held at once other than those of agents, which are counted separately."""
        return self.max_in_flight - self.max_in_flight // 4

    @property
    def max_streams(self) -> int:
        """Event streams open at once in a worker: each costs a query a second, and may take half of the requests."""
        return min(200, max(1, self.max_ordinary_in_flight // 2))

    @property
    def on_loopback(self) -> bool:
        """True when only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _as_text(value: object) -> str:
    return ("1" if value else "0") if isinstance(value, bool) else str(value)


def _parsed(item: dataclasses.Field[Any], text: str) -> Any:
    kind = str(item.type)
    name = PREFIX + item.name.upper()
    if kind == "bool":
        if text.lower() in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            return text.lower() in ("1", "true", "yes", "on")
        raise SettingsError(f"{name} is {text!r}: use 1 or 0.")
    try:
        return {"int": int, "float": float, "str": str}[kind](text)
    except ValueError:
        raise SettingsError(f"{name} is {text!r}: give a number.") from None
