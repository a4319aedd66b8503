"""The settings of the service, which are read once at start, never at import."""

from __future__ import annotations

import ipaddress
from typing import Any, Final, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from tula_wire.problems import remedy

PREFIX: Final = "TULA_"


class SettingsError(ValueError):
    """A setting has an invalid value; the message names the setting and says what to give."""


class Settings(BaseSettings):
    """One field per setting; the environment variable is `TULA_` and the field's name in capitals."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="ignore", frozen=True)

    database: str = Field("tula.db", description="SQLite file, or postgresql+psycopg:// URL.")
    host: str = Field("127.0.0.1", description="Address to listen on; any but loopback needs a token to exist first.")
    port: int = Field(8321, ge=0, le=65_535, description="Port to listen on; 0 takes a free one.")
    workers: int = Field(1, ge=1, description="Processes that serve; they share the database and metrics.")
    threads: int = Field(16, ge=2, description="Requests that a worker handles at once, and its database connections.")
    max_in_flight: int = Field(
        256,
        ge=1,
        description="Requests of agents that a worker holds at once, and 3/4 as many others.",
    )
    requests_per_minute: int = Field(6_000, ge=1, description="Requests of one token to one worker, ingest excluded.")
    ingest_per_minute: int = Field(240_000, ge=1, description="The same for samples and telemetry.")
    shutdown_s: int = Field(20, ge=1, description="How long accepted requests may take to finish at shutdown.")
    retention_days: float = Field(90.0, ge=0, description="Age at which `tula prune` deletes archived jobs.")
    telemetry_days: float = Field(
        0.0, ge=0, description="Age at which `tula prune` drops a month of telemetry, on Postgres; 0 keeps all."
    )
    archive: str = Field("", description="Folder or s3:// URL: a month goes there as Parquet before it is dropped.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug also logs ingest.")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, else json.")
    read_only: bool = Field(False, description="Refuse every change, and show the page of accuracy without a token.")
    trace: bool = Field(False, description="OpenTelemetry traces; needs the extra `otel` and OTEL_ variables.")

    @classmethod
    def read(cls, **flags: Any) -> Settings:
        """Read settings from flags that are not None, and from the environment.

        Raises SettingsError for an invalid value.
        """
        try:
            return cls(**{name: value for name, value in flags.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            raise SettingsError(f"{PREFIX}{str(first['loc'][0]).upper()} {remedy(first)}") from None

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables that pass these settings on to workers."""
        return {PREFIX + name.upper(): str(value) for name, value in self}

    @property
    def max_ordinary_in_flight(self) -> int:
        """Return the maximum number of concurrent requests, except those from agents, which are counted separately."""
        return self.max_in_flight - self.max_in_flight // 4

    @property
    def max_streams(self) -> int:
        """Return the maximum number of open event streams in a worker, at most half of the requests.

        Each stream costs a query per second."""
        return min(200, max(1, self.max_ordinary_in_flight // 2))

    @property
    def on_loopback(self) -> bool:
        """Return True if only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
