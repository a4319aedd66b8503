"""Defines the service's settings, which are read once when the service starts, and never at import."""

from __future__ import annotations

import ipaddress
from typing import Any, Final, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from tula_wire.problems import remedy

PREFIX: Final = "TULA_"


class SettingsError(ValueError):
    """A setting has an invalid value; the message names the setting and describes the valid values."""


class Settings(BaseSettings):
    """The service's settings. Each is read from the environment variable `TULA_` plus the field's name in capitals."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="ignore", frozen=True)

    database: str = Field("tula.db", description="SQLite file or postgresql+psycopg:// URL.")
    host: str = Field("127.0.0.1", description="Address to listen on; any address except loopback requires a token.")
    port: int = Field(8321, ge=0, le=65_535, description="Port to listen on; 0 selects a free port.")
    workers: int = Field(1, ge=1, description="Number of worker processes, which share the database and the metrics.")
    threads: int = Field(16, ge=2, description="Concurrent requests per worker, and database connections per worker.")
    max_in_flight: int = Field(
        256,
        ge=1,
        description="Maximum agent requests in progress per worker; all other requests share 3/4 of this limit.",
    )
    requests_per_minute: int = Field(
        6_000, ge=1, description="Maximum requests per token and worker, excluding samples and telemetry."
    )
    ingest_per_minute: int = Field(
        240_000, ge=1, description="Maximum requests with samples or telemetry per token and worker."
    )
    shutdown_s: int = Field(20, ge=1, description="Maximum time for accepted requests to finish at shutdown.")
    retention_days: float = Field(90.0, ge=0, description="Age at which `tula prune` deletes archived jobs.")
    telemetry_days: float = Field(
        0.0, ge=0, description="Age at which `tula prune` drops a month of telemetry (Postgres only); 0 keeps all."
    )
    archive: str = Field(
        "", description="Folder or s3:// URL where telemetry is saved as Parquet before it is dropped."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Log level; debug also logs ingest requests and health checks."
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="Log format; auto is text on a terminal, else json."
    )
    read_only: bool = Field(False, description="Reject every change, and show the accuracy page without a token.")
    trace: bool = Field(False, description="Export OpenTelemetry traces; needs the extra `otel` and OTEL_ variables.")

    @classmethod
    def read(cls, **flags: Any) -> Settings:
        """Return the settings from the environment, overridden by the flags that are not None.

        Raises SettingsError if a value is invalid.
        """
        try:
            return cls(**{name: value for name, value in flags.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            raise SettingsError(f"{PREFIX}{str(first['loc'][0]).upper()} {remedy(first)}") from None

    def to_environment(self) -> dict[str, str]:
        """Return these settings as environment variables, from which worker processes read them."""
        return {PREFIX + name.upper(): str(value) for name, value in self}

    @property
    def max_ordinary_in_flight(self) -> int:
        """Return the maximum number of concurrent requests that do not come from agents."""
        return self.max_in_flight - self.max_in_flight // 4

    @property
    def max_streams(self) -> int:
        """Return the maximum number of open event streams per worker, since each stream runs a query every second.

        Streams may be at most half of `max_ordinary_in_flight`."""
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
