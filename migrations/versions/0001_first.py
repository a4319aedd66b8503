"""Creates the first schema.

Until the first release, change the schema by editing this file and `tula_service/store/tables.py` (a test checks that
the two agree), and update the dump with `python -m tests.service.store.make_asset`. After the first release, add a new
migration for each schema change.

Revision ID: 0001
"""

from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
TIME = sa.DateTime(timezone=True)

ON_SQLITE = (
    "CREATE TRIGGER ledger_is_immutable BEFORE UPDATE ON ledger "
    "BEGIN SELECT RAISE(ABORT, 'ledger entries are immutable'); END",
    "CREATE VIRTUAL TABLE jobs_search USING fts5"
    "(name, model_name, content='jobs', content_rowid='key', tokenize='trigram')",
    "CREATE TRIGGER jobs_search_insert AFTER INSERT ON jobs BEGIN"
    " INSERT INTO jobs_search (rowid, name, model_name) VALUES (new.key, new.name, new.model_name); END",
    "CREATE TRIGGER jobs_search_delete AFTER DELETE ON jobs BEGIN"
    " INSERT INTO jobs_search (jobs_search, rowid, name, model_name)"
    " VALUES ('delete', old.key, old.name, old.model_name); END",  # no trigger for updates, since names never change
)

ON_POSTGRES = (
    "CREATE FUNCTION refuse_ledger_update() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'ledger entries are immutable'; END $$",
    "CREATE TRIGGER ledger_is_immutable BEFORE UPDATE ON ledger FOR EACH ROW EXECUTE FUNCTION refuse_ledger_update()",
    # This function replaces the part of the extension pg_trgm that the index needs, since not every server has pg_trgm.
    "CREATE FUNCTION tula_trigrams(text) RETURNS text[] LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE COST 500 AS $$ "
    "DECLARE trigrams text[] := '{}'; BEGIN FOR at IN 1 .. length($1) - 2 LOOP "
    "trigrams := trigrams || substr($1, at, 3); END LOOP; RETURN trigrams; END $$",
    "CREATE INDEX ix_jobs_trigrams ON jobs USING gin (tula_trigrams(lower(name || ' ' || model_name)))",
    # Payloads are already compressed, so Postgres should not try to compress them again.
    "ALTER TABLE telemetry_chunks ALTER COLUMN payload SET STORAGE EXTERNAL",
    # The key of a run begins with the month in which it was created (`store/partitions.py`).
    "ALTER TABLE runs ALTER COLUMN key SET DEFAULT"
    " to_char(now() AT TIME ZONE 'UTC', 'YYYYMM')::bigint * 1000000000 + nextval('runs_key_seq')",
)


def key(name: str = "key") -> sa.Column[Any]:
    return sa.Column(name, BIG, primary_key=True, autoincrement=True)


def parent(column: str, target: str, kind: Any = sa.Text, **options: Any) -> sa.Column[Any]:
    return sa.Column(column, kind, sa.ForeignKey(target, ondelete="CASCADE"), **options)


def required(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def optional(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind) for name in names]


def upgrade() -> None:
    op.create_table(
        "audit_log",
        key("id"),
        *required(TIME, "at"),
        *required(sa.Text, "actor", "action", "target"),
        *required(JSON, "detail"),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        *required(TIME, "created_at"),
    )
    op.create_table(
        "jobs",
        key(),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        parent("project_id", "projects.id", nullable=False),
        *required(sa.Text, "name", "model_name", "state", "objective", "plan_reason"),
        *required(JSON, "spec"),
        *required(sa.BigInteger, "data_version"),
        *required(TIME, "created_at", "updated_at"),
        *optional(JSON, "recommended", "cross_validated_runs"),
        *optional(sa.Double, "predicted_time_s", "predicted_cost_usd", "saving_vs_smallest_batch"),
        *optional(sa.Double, "saving_vs_largest_batch", "prediction_error", "cross_validated_error"),
        *optional(sa.Text, "idempotency_key", "fingerprint", "cross_validated_model"),
        sa.Column("plan_state", sa.Text, nullable=False, server_default="current"),
        sa.Column("retried_up_to_key", BIG, nullable=False, server_default="0"),
        sa.UniqueConstraint("project_id", "idempotency_key"),
    )
    op.create_index("ix_jobs_project_id_state_key", "jobs", ["project_id", "state", "key"])
    op.create_index("ix_jobs_project_id_fingerprint", "jobs", ["project_id", "fingerprint"])
    op.create_index("ix_jobs_project_id_name", "jobs", ["project_id", "name"])
    op.create_index("ix_jobs_listed", "jobs", ["project_id", "key", "state", "name", "model_name"])
    op.create_index("ix_jobs_model_name", "jobs", ["model_name"])
    op.create_table(
        "job_lessons",
        parent("job_id", "jobs.id", primary_key=True),
        *required(JSON, "posteriors", "prediction_pairs"),
    )
    op.create_table(
        "fabrics",
        key(),
        parent("project_id", "projects.id", nullable=False),
        *required(sa.Text, "instance_type"),
        parent("job_id", "jobs.id"),
        *required(JSON, "probe"),
        *required(TIME, "created_at"),
    )
    op.create_index("ix_fabrics_project_id_instance_type_key", "fabrics", ["project_id", "instance_type", "key"])
    op.create_table(
        "runs",
        key(),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        parent("job_id", "jobs.id", nullable=False),
        *required(sa.Text, "project_id", "kind", "state", "instance_type", "purpose"),
        *required(sa.Integer, "num_nodes", "ranks_per_node", "local_batch_size", "grad_accum_steps", "position"),
        sa.Column("origin", sa.Text, nullable=False, server_default="plan"),
        *required(JSON, "options"),
        *optional(JSON, "instruction"),
        *optional(sa.Text, "end_cause", "message", "method", "holder", "recommendation_id", "drift_sentence"),
        *optional(sa.Double, "lease_s", "predicted_step_time_s", "time_limit_s"),
        *optional(TIME, "lease_expires_at", "started_at", "finished_at"),
        *required(TIME, "created_at"),
        *required(sa.BigInteger, "num_samples", "num_measured", "dropped"),
        sa.Column("lease", sa.Integer, nullable=False, server_default="0"),
        *optional(sa.Integer, "failed_local_batch_size"),
        *optional(JSON, "monitor"),
        sa.Column("unsteady", sa.Boolean, nullable=False, server_default=sa.false()),
    )
    op.create_index("ix_runs_job_id_state_position_key", "runs", ["job_id", "state", "position", "key"])
    op.create_table(
        "run_outputs",
        parent("run_key", "runs.key", BIG, primary_key=True, autoincrement=False),
        *required(sa.Text, "text"),
    )
    op.create_table(
        "run_summaries",
        parent("run_key", "runs.key", BIG, primary_key=True, autoincrement=False),
        *required(sa.BigInteger, "of_num_samples", "num_samples", "num_steps"),
        *optional(sa.Double, "step_time_s", "relative_sd", "compute_time_s", "comm_time_s", "exposed_comm_time_s"),
        *optional(sa.Double, "input_time_s", "optimizer_time_s", "skew_s"),
        *optional(sa.Integer, "straggler_rank", "world_size", "local_batch_size", "grad_accum_steps"),
        *optional(sa.Text, "timing_method"),
        *optional(sa.Double, "energy_per_step_j"),
    )
    op.create_table(
        "sample_sources",
        key(),
        parent("run_key", "runs.key", BIG, nullable=False),
        *required(sa.Integer, "rank"),
        *required(sa.Text, "boot_id", "timing_method"),
        *optional(sa.Integer, "world_size", "local_batch_size", "grad_accum_steps"),
        *optional(JSON, "timeline", "machine"),
        *optional(sa.Double, "energy_per_step_j"),
        sa.UniqueConstraint("run_key", "rank", "boot_id"),
    )
    op.create_table(
        "step_samples",
        parent("source_key", "sample_sources.key", BIG, primary_key=True, autoincrement=False),
        sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
        *required(BIG, "run_key"),
        *required(sa.Integer, "rank"),
        *required(sa.BigInteger, "step"),
        *required(sa.Boolean, "warmup"),
        *required(sa.Double, "step_time_s"),
        *optional(sa.Double, "compute_time_s", "comm_time_s", "exposed_comm_time_s"),
        *optional(sa.Double, "input_time_s", "skew_s", "optimizer_time_s"),
        *optional(sa.Integer, "straggler_rank"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_step_samples_run_key_warmup_step", "step_samples", ["run_key", "warmup", "step"])
    op.create_table(
        "memory_readings",
        parent("source_key", "sample_sources.key", BIG, primary_key=True, autoincrement=False),
        *required(BIG, "run_key"),
        *required(sa.Text, "method"),
        *required(sa.BigInteger, "peak_bytes"),
        *optional(sa.BigInteger, "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"),
        *optional(sa.BigInteger, "batch_bytes", "reserved_bytes", "context_bytes", "capacity_bytes", "alloc_retries"),
        *optional(sa.Boolean, "growing_segments"),
    )
    op.create_index("ix_memory_readings_run_key", "memory_readings", ["run_key"])
    op.create_table(
        "telemetry_chunks",  # on Postgres, `store/partitions.py` creates its partitions
        parent("run_key", "runs.key", BIG, primary_key=True, autoincrement=False),
        sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("boot_id", sa.Text, primary_key=True),
        sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
        *required(sa.BigInteger, "first_step", "last_step"),
        *required(sa.Integer, "num_steps"),
        *required(sa.Text, "columns"),
        *required(sa.LargeBinary, "payload"),
        postgresql_partition_by="RANGE (run_key)",
    )
    op.create_index(
        "ix_telemetry_chunks_run_key_rank_first_step", "telemetry_chunks", ["run_key", "rank", "first_step"]
    )
    op.create_table(
        "telemetry_columns",
        parent("run_key", "runs.key", BIG, primary_key=True, autoincrement=False),
        sa.Column("name", sa.Text, primary_key=True),
        *required(sa.BigInteger, "num_steps"),
        *optional(sa.BigInteger, "newest_step"),
        *optional(sa.Double, "newest_value"),
    )
    op.create_table(
        "ledger",
        key(),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        parent("job_id", "jobs.id", nullable=False),
        *required(TIME, "created_at"),
        *required(sa.Text, "objective", "basis", "model_version"),
        *optional(JSON, "configuration"),
        *required(JSON, "prices"),
        *required(sa.BigInteger, "data_version"),
        *optional(sa.Double, "step_time_s", "step_time_low_s", "step_time_high_s", "interval_scale", "cost_usd"),
        *optional(sa.Double, "cost_low_usd", "cost_high_usd"),
    )
    op.create_index("ix_ledger_job_id", "ledger", ["job_id"])
    op.create_table(
        "ledger_outcomes",
        parent("ledger_id", "ledger.id", primary_key=True),
        parent("run_id", "runs.id", primary_key=True),
        *required(sa.Double, "measured_step_time_s"),
        *optional(sa.Double, "error"),
        *optional(sa.Boolean, "within_interval"),
        *required(TIME, "at"),
    )
    op.create_table(
        "scaling_numbers",
        parent("job_id", "jobs.id", primary_key=True),
        sa.Column("policy", sa.Text, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        *optional(sa.Double, "delta", "static_scale", "s_min", "s_max"),
        *optional(sa.BigInteger, "small_batch_size"),
    )
    op.create_table(
        "answers",
        parent("job_id", "jobs.id", primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        *required(sa.BigInteger, "data_version"),
        *required(sa.Text, "model_version", "body"),
        *required(TIME, "created_at"),
    )
    op.create_table(
        "events",
        key("id"),
        parent("job_id", "jobs.id", nullable=False),
        *optional(sa.Text, "run_id"),
        *required(sa.Text, "kind"),
        *required(TIME, "at"),
        *required(JSON, "data"),
    )
    op.create_index("ix_events_job_id_id", "events", ["job_id", "id"])
    op.create_table(
        "tokens",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("sha256", sa.Text, nullable=False, unique=True),
        *required(sa.Text, "name", "scope"),
        parent("project_id", "projects.id"),
        parent("job_id", "jobs.id"),
        *required(TIME, "created_at"),
        *optional(TIME, "expires_at", "last_used_at", "revoked_at"),
    )
    op.create_table(
        "sessions",
        sa.Column("sha256", sa.Text, primary_key=True),
        parent("token_id", "tokens.id", nullable=False),
        *required(TIME, "created_at", "expires_at"),
    )
    op.create_index("ix_sessions_token_id", "sessions", ["token_id"])

    on_sqlite = op.get_bind().dialect.name == "sqlite"
    for statement in ON_SQLITE if on_sqlite else ON_POSTGRES:
        op.execute(statement)
    now = datetime.now(timezone.utc)
    projects = sa.table("projects", sa.column("id"), sa.column("name"), sa.column("created_at", TIME))
    created_at = now.replace(tzinfo=None) if on_sqlite else now
    op.bulk_insert(projects, [{"id": "default", "name": "default", "created_at": created_at}])


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was taken before the upgrade")
