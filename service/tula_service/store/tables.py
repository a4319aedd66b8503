"""Describes the tables for building queries; `migrations/` creates these tables, and a test compares the two."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql


class UtcTime(sa.types.TypeDecorator[datetime]):
    """A column type for timezone-aware times, stored as `timestamptz` on Postgres and as naive UTC text on SQLite."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Return the time in the database's format. Raises ValueError for a naive time, which is ambiguous."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("the store does not accept a naive datetime: give it a time zone")
        utc = value.astimezone(timezone.utc)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:  # noqa: ARG002
        """Return the stored time as a timezone-aware datetime in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


METADATA = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite generates only INTEGER keys
JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def _key(name: str = "key") -> sa.Column[int]:
    return sa.Column(name, BIG, primary_key=True, autoincrement=True)


def _parent(column: str, target: str, kind: Any = sa.Text, **options: Any) -> sa.Column[Any]:
    return sa.Column(column, kind, sa.ForeignKey(target, ondelete="CASCADE"), **options)


def _required(kind: Any, *names: str) -> list[sa.Column[Any]]:
    """Return non-nullable columns with these names and this type."""
    return [sa.Column(name, kind, nullable=False) for name in names]


def _optional(kind: Any, *names: str) -> list[sa.Column[Any]]:
    """Return nullable columns with these names and this type."""
    return [sa.Column(name, kind) for name in names]


projects = sa.Table(
    "projects",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", UtcTime, nullable=False),
)

jobs = sa.Table(
    "jobs",
    METADATA,
    _key(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    _parent("project_id", "projects.id", nullable=False),
    *_required(sa.Text, "name", "model_name", "state", "objective", "plan_reason"),
    sa.Column("spec", JSON, nullable=False),
    sa.Column("data_version", sa.BigInteger, nullable=False),
    *_required(UtcTime, "created_at", "updated_at"),
    *_optional(JSON, "recommended", "cross_validated_runs"),
    *_optional(sa.Double, "predicted_time_s", "predicted_cost_usd", "saving_vs_smallest_batch"),
    *_optional(sa.Double, "saving_vs_largest_batch", "prediction_error", "cross_validated_error"),
    *_optional(sa.Text, "idempotency_key", "fingerprint", "cross_validated_model"),
    sa.Column("plan_state", sa.Text, nullable=False, server_default="current"),
    sa.Column("retried_up_to_key", BIG, nullable=False, server_default="0"),
    sa.UniqueConstraint("project_id", "idempotency_key"),
    sa.Index("ix_jobs_project_id_state_key", "project_id", "state", "key"),
    sa.Index("ix_jobs_project_id_fingerprint", "project_id", "fingerprint"),
    sa.Index("ix_jobs_project_id_name", "project_id", "name"),
    sa.Index("ix_jobs_listed", "project_id", "key", "state", "name", "model_name"),  # all columns on which lists filter
    sa.Index("ix_jobs_model_name", "model_name"),
)

job_lessons = sa.Table(
    "job_lessons",
    METADATA,
    _parent("job_id", "jobs.id", primary_key=True),
    *_required(JSON, "posteriors", "prediction_pairs"),
)

fabrics = sa.Table(
    "fabrics",
    METADATA,
    _key(),
    _parent("project_id", "projects.id", nullable=False),
    sa.Column("instance_type", sa.Text, nullable=False),
    _parent("job_id", "jobs.id"),  # the job whose run measured the probe; null for a probe sent by a user
    sa.Column("probe", JSON, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Index("ix_fabrics_project_id_instance_type_key", "project_id", "instance_type", "key"),
)

runs = sa.Table(
    "runs",
    METADATA,
    _key(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    _parent("job_id", "jobs.id", nullable=False),
    *_required(sa.Text, "project_id", "kind", "state", "instance_type", "purpose"),
    *_required(sa.Integer, "num_nodes", "ranks_per_node", "local_batch_size", "grad_accum_steps", "position"),
    sa.Column("origin", sa.Text, nullable=False, server_default="plan"),
    sa.Column("options", JSON, nullable=False),  # the configuration's options, by name
    sa.Column("instruction", JSON),
    *_optional(sa.Text, "end_cause", "message", "method", "holder", "recommendation_id", "drift_sentence"),
    *_optional(sa.Double, "lease_s", "predicted_step_time_s", "time_limit_s"),
    *_optional(UtcTime, "lease_expires_at", "started_at", "finished_at"),
    sa.Column("created_at", UtcTime, nullable=False),
    *_required(sa.BigInteger, "num_samples", "num_measured", "dropped"),
    sa.Column("lease", sa.Integer, nullable=False, server_default="0"),  # increases when the run may get another holder
    sa.Column("failed_local_batch_size", sa.Integer),
    sa.Column("monitor", JSON),  # see analysis.alarm.Monitor
    sa.Column("unsteady", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Index("ix_runs_job_id_state_position_key", "job_id", "state", "position", "key"),
)

run_outputs = sa.Table(
    "run_outputs",
    METADATA,
    _parent("run_key", "runs.key", BIG, primary_key=True, autoincrement=False),
    sa.Column("text", sa.Text, nullable=False),
)

run_summaries = sa.Table(
    "run_summaries",
    METADATA,
    _parent("run_key", "runs.key", BIG, primary_key=True, autoincrement=False),
    sa.Column("of_num_samples", sa.BigInteger, nullable=False),  # the summary is stale if the run has more samples
    *_required(sa.BigInteger, "num_samples", "num_steps"),
    *_optional(sa.Double, "step_time_s", "relative_sd", "compute_time_s", "comm_time_s", "exposed_comm_time_s"),
    *_optional(sa.Double, "input_time_s", "optimizer_time_s", "skew_s"),
    *_optional(sa.Integer, "straggler_rank", "world_size", "local_batch_size", "grad_accum_steps"),
    sa.Column("timing_method", sa.Text),
    sa.Column("energy_per_step_j", sa.Double),
)

sample_sources = sa.Table(
    "sample_sources",
    METADATA,
    _key(),
    _parent("run_key", "runs.key", BIG, nullable=False),
    sa.Column("rank", sa.Integer, nullable=False),
    *_required(sa.Text, "boot_id", "timing_method"),
    *_optional(sa.Integer, "world_size", "local_batch_size", "grad_accum_steps"),
    *_optional(JSON, "timeline", "machine"),
    sa.Column("energy_per_step_j", sa.Double),
    sa.UniqueConstraint("run_key", "rank", "boot_id"),
)

step_samples = sa.Table(
    "step_samples",
    METADATA,
    _parent("source_key", "sample_sources.key", BIG, primary_key=True, autoincrement=False),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("run_key", BIG, nullable=False),
    sa.Column("rank", sa.Integer, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("warmup", sa.Boolean, nullable=False),
    sa.Column("step_time_s", sa.Double, nullable=False),
    *_optional(sa.Double, "compute_time_s", "comm_time_s", "exposed_comm_time_s"),
    *_optional(sa.Double, "input_time_s", "skew_s", "optimizer_time_s"),
    sa.Column("straggler_rank", sa.Integer),
    sa.Index("ix_step_samples_run_key_warmup_step", "run_key", "warmup", "step"),
    sqlite_with_rowid=False,
)

memory_readings = sa.Table(
    "memory_readings",
    METADATA,
    _parent("source_key", "sample_sources.key", BIG, primary_key=True, autoincrement=False),
    sa.Column("run_key", BIG, nullable=False, index=True),
    sa.Column("method", sa.Text, nullable=False),
    sa.Column("peak_bytes", sa.BigInteger, nullable=False),
    *_optional(sa.BigInteger, "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"),
    *_optional(sa.BigInteger, "batch_bytes", "reserved_bytes", "context_bytes", "capacity_bytes", "alloc_retries"),
    *_optional(sa.Boolean, "growing_segments"),
)

telemetry_chunks = sa.Table(
    "telemetry_chunks",
    METADATA,
    _parent("run_key", "runs.key", BIG, primary_key=True, autoincrement=False),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("boot_id", sa.Text, primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    *_required(sa.BigInteger, "first_step", "last_step"),
    sa.Column("num_steps", sa.Integer, nullable=False),
    sa.Column("columns", sa.Text, nullable=False),  # comma-separated names, in the order of the payload
    sa.Column("payload", sa.LargeBinary, nullable=False),  # see store/telemetry.py:pack
    sa.Index("ix_telemetry_chunks_run_key_rank_first_step", "run_key", "rank", "first_step"),
)

telemetry_columns = sa.Table(
    "telemetry_columns",  # names of columns that any rank sent; the values come only from rank 0
    METADATA,
    _parent("run_key", "runs.key", BIG, primary_key=True, autoincrement=False),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("num_steps", sa.BigInteger, nullable=False),
    sa.Column("newest_step", sa.BigInteger),
    sa.Column("newest_value", sa.Double),
)

ledger = sa.Table(
    "ledger",
    METADATA,
    _key(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    _parent("job_id", "jobs.id", nullable=False, index=True),
    sa.Column("created_at", UtcTime, nullable=False),
    *_required(sa.Text, "objective", "basis", "model_version"),
    sa.Column("configuration", JSON),
    sa.Column("prices", JSON, nullable=False),
    sa.Column("data_version", sa.BigInteger, nullable=False),
    *_optional(sa.Double, "step_time_s", "step_time_low_s", "step_time_high_s", "interval_scale", "cost_usd"),
    *_optional(sa.Double, "cost_low_usd", "cost_high_usd"),
)

ledger_outcomes = sa.Table(
    "ledger_outcomes",
    METADATA,
    _parent("ledger_id", "ledger.id", primary_key=True),
    _parent("run_id", "runs.id", primary_key=True),
    sa.Column("measured_step_time_s", sa.Double, nullable=False),
    sa.Column("error", sa.Double),
    sa.Column("within_interval", sa.Boolean),
    sa.Column("at", UtcTime, nullable=False),
)

scaling_numbers = sa.Table(
    "scaling_numbers",
    METADATA,
    _parent("job_id", "jobs.id", primary_key=True),
    sa.Column("policy", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
    *_optional(sa.Double, "delta", "static_scale", "s_min", "s_max"),
    *_optional(sa.BigInteger, "small_batch_size"),
)

answers = sa.Table(
    "answers",
    METADATA,
    _parent("job_id", "jobs.id", primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("data_version", sa.BigInteger, nullable=False),
    *_required(sa.Text, "model_version", "body"),
    sa.Column("created_at", UtcTime, nullable=False),
)

events = sa.Table(
    "events",
    METADATA,
    _key("id"),
    _parent("job_id", "jobs.id", nullable=False),
    sa.Column("run_id", sa.Text),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("at", UtcTime, nullable=False),
    sa.Column("data", JSON, nullable=False),
    sa.Index("ix_events_job_id_id", "job_id", "id"),
)

tokens = sa.Table(
    "tokens",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("sha256", sa.Text, nullable=False, unique=True),
    *_required(sa.Text, "name", "scope"),
    _parent("project_id", "projects.id"),
    _parent("job_id", "jobs.id"),
    sa.Column("created_at", UtcTime, nullable=False),
    *_optional(UtcTime, "expires_at", "last_used_at", "revoked_at"),
)

sessions = sa.Table(
    "sessions",
    METADATA,
    sa.Column("sha256", sa.Text, primary_key=True),
    _parent("token_id", "tokens.id", nullable=False, index=True),
    *_required(UtcTime, "created_at", "expires_at"),
)

audit_log = sa.Table(
    "audit_log",
    METADATA,
    _key("id"),
    sa.Column("at", UtcTime, nullable=False),
    *_required(sa.Text, "actor", "action", "target"),
    sa.Column("detail", JSON, nullable=False),
)
