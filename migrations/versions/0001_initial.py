"""The first schema: projects, jobs, runs, samples, telemetry, ledger, tokens, audit.

Revision ID: 0001
"""

from datetime import datetime, timezone

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("detail", JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
        sa.UniqueConstraint("name", name="uq_projects_name"),
    )
    op.create_table(
        "jobs",
        sa.Column("key", BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("objective", sa.Text(), nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("data_version", sa.BigInteger(), nullable=False),
        sa.Column("plan_reason", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.Column("recommended", JSON),
        sa.Column("predicted_time_s", sa.Double()),
        sa.Column("predicted_cost_usd", sa.Double()),
        sa.Column("saving_vs_smallest_batch", sa.Double()),
        sa.Column("saving_vs_largest_batch", sa.Double()),
        sa.Column("prediction_error", sa.Double()),
        sa.Column("idempotency_key", sa.Text()),
        sa.Column("fingerprint", sa.Text()),
        sa.PrimaryKeyConstraint("key", name="pk_jobs"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_jobs_project_id", ondelete="CASCADE"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.UniqueConstraint("project_id", "idempotency_key", name="uq_jobs_project_id_idempotency_key"),
    )
    op.create_index("ix_jobs_model_name", "jobs", ["model_name"])
    op.create_index("ix_jobs_project_id_fingerprint", "jobs", ["project_id", "fingerprint"])
    op.create_index("ix_jobs_project_id_state_key", "jobs", ["project_id", "state", "key"])
    op.create_table(
        "events",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text()),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("data", JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id", ondelete="CASCADE"),
    )
    op.create_index("ix_events_job_id_id", "events", ["job_id", "id"])
    op.create_table(
        "fits",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("data_version", sa.BigInteger(), nullable=False),
        sa.Column("model_version", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "name", name="pk_fits"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_fits_job_id", ondelete="CASCADE"),
    )
    op.create_table(
        "ledger",
        sa.Column("key", BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("objective", sa.Text(), nullable=False),
        sa.Column("basis", sa.Text(), nullable=False),
        sa.Column("configuration", JSON),
        sa.Column("prices", JSON, nullable=False),
        sa.Column("model_version", sa.Text(), nullable=False),
        sa.Column("data_version", sa.BigInteger(), nullable=False),
        sa.Column("step_time_s", sa.Double()),
        sa.Column("step_time_low_s", sa.Double()),
        sa.Column("step_time_high_s", sa.Double()),
        sa.Column("cost_usd", sa.Double()),
        sa.Column("cost_low_usd", sa.Double()),
        sa.Column("cost_high_usd", sa.Double()),
        sa.PrimaryKeyConstraint("key", name="pk_ledger"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_ledger_job_id", ondelete="CASCADE"),
        sa.UniqueConstraint("id", name="uq_ledger_id"),
    )
    op.create_index("ix_ledger_job_id", "ledger", ["job_id"])
    op.create_table(
        "runs",
        sa.Column("key", BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("num_nodes", sa.Integer(), nullable=False),
        sa.Column("ranks_per_node", sa.Integer(), nullable=False),
        sa.Column("local_batch_size", sa.Integer(), nullable=False),
        sa.Column("grad_accum_steps", sa.Integer(), nullable=False),
        sa.Column("instance_type", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("instruction", JSON),
        sa.Column("message", sa.Text()),
        sa.Column("method", sa.Text()),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("holder", sa.Text()),
        sa.Column("lease_s", sa.Double()),
        sa.Column("lease_expires_at", TIME),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("started_at", TIME),
        sa.Column("finished_at", TIME),
        sa.Column("num_samples", sa.BigInteger(), nullable=False),
        sa.Column("dropped", sa.BigInteger(), nullable=False),
        sa.Column("failed_local_batch_size", sa.Integer()),
        sa.Column("predicted_step_time_s", sa.Double()),
        sa.Column("recommendation_id", sa.Text()),
        sa.Column("straggler_rank", sa.Integer()),
        sa.Column("drifted", sa.Boolean(), nullable=False),
        sa.Column("drift_state", JSON),
        sa.PrimaryKeyConstraint("key", name="pk_runs"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_runs_job_id", ondelete="CASCADE"),
        sa.UniqueConstraint("id", name="uq_runs_id"),
    )
    op.create_index("ix_runs_job_id_state_position_key", "runs", ["job_id", "state", "position", "key"])
    op.create_table(
        "scaling_versions",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("body", JSON, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "version", name="pk_scaling_versions"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_scaling_versions_job_id", ondelete="CASCADE"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text()),
        sa.Column("job_id", sa.Text()),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("expires_at", TIME),
        sa.Column("last_used_at", TIME),
        sa.Column("revoked_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_tokens_job_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_tokens_project_id", ondelete="CASCADE"),
        sa.UniqueConstraint("sha256", name="uq_tokens_sha256"),
    )
    op.create_table(
        "ledger_outcomes",
        sa.Column("ledger_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("measured_step_time_s", sa.Double(), nullable=False),
        sa.Column("error", sa.Double()),
        sa.Column("within_interval", sa.Boolean()),
        sa.Column("at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("ledger_id", "run_id", name="pk_ledger_outcomes"),
        sa.ForeignKeyConstraint(["ledger_id"], ["ledger.id"], name="fk_ledger_outcomes_ledger_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_ledger_outcomes_run_id", ondelete="CASCADE"),
    )
    op.create_table(
        "run_summaries",
        sa.Column("run_key", BIG, nullable=False),
        sa.Column("of_num_samples", sa.BigInteger(), nullable=False),
        sa.Column("num_samples", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=False),
        sa.Column("step_time_s", sa.Double()),
        sa.Column("relative_sd", sa.Double()),
        sa.Column("compute_time_s", sa.Double()),
        sa.Column("comm_time_s", sa.Double()),
        sa.Column("exposed_comm_time_s", sa.Double()),
        sa.Column("input_time_s", sa.Double()),
        sa.Column("skew_s", sa.Double()),
        sa.Column("straggler_rank", sa.Integer()),
        sa.Column("world_size", sa.Integer()),
        sa.Column("local_batch_size", sa.Integer()),
        sa.Column("grad_accum_steps", sa.Integer()),
        sa.Column("timing_method", sa.Text()),
        sa.PrimaryKeyConstraint("run_key", name="pk_run_summaries"),
        sa.ForeignKeyConstraint(["run_key"], ["runs.key"], name="fk_run_summaries_run_key", ondelete="CASCADE"),
    )
    op.create_table(
        "sample_sources",
        sa.Column("key", BIG, autoincrement=True, nullable=False),
        sa.Column("run_key", BIG, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("world_size", sa.Integer()),
        sa.Column("local_batch_size", sa.Integer()),
        sa.Column("grad_accum_steps", sa.Integer()),
        sa.Column("timing_method", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_sample_sources"),
        sa.ForeignKeyConstraint(["run_key"], ["runs.key"], name="fk_sample_sources_run_key", ondelete="CASCADE"),
        sa.UniqueConstraint("run_key", "rank", "boot_id", name="uq_sample_sources_run_key_rank_boot_id"),
    )
    op.create_table(
        "telemetry_chunks",
        sa.Column("run_key", BIG, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.Integer(), nullable=False),
        sa.Column("columns", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_key", "rank", "boot_id", "sequence", name="pk_telemetry_chunks"),
        sa.ForeignKeyConstraint(["run_key"], ["runs.key"], name="fk_telemetry_chunks_run_key", ondelete="CASCADE"),
    )
    op.create_table(
        "memory_readings",
        sa.Column("source_key", BIG, nullable=False),
        sa.Column("run_key", BIG, nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("peak_bytes", sa.BigInteger(), nullable=False),
        sa.Column("parameter_bytes", sa.BigInteger()),
        sa.Column("gradient_bytes", sa.BigInteger()),
        sa.Column("optimizer_bytes", sa.BigInteger()),
        sa.Column("activation_bytes", sa.BigInteger()),
        sa.Column("batch_bytes", sa.BigInteger()),
        sa.Column("reserved_bytes", sa.BigInteger()),
        sa.Column("context_bytes", sa.BigInteger()),
        sa.Column("capacity_bytes", sa.BigInteger()),
        sa.PrimaryKeyConstraint("source_key", name="pk_memory_readings"),
        sa.ForeignKeyConstraint(["source_key"], ["sample_sources.key"], name="fk_memory_readings_source_key", ondelete="CASCADE"),
    )
    op.create_index("ix_memory_readings_run_key", "memory_readings", ["run_key"])
    op.create_table(
        "step_samples",
        sa.Column("source_key", BIG, nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("run_key", BIG, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("warmup", sa.Boolean(), nullable=False),
        sa.Column("step_time_s", sa.Double(), nullable=False),
        sa.Column("compute_time_s", sa.Double()),
        sa.Column("comm_time_s", sa.Double()),
        sa.Column("exposed_comm_time_s", sa.Double()),
        sa.Column("input_time_s", sa.Double()),
        sa.Column("skew_s", sa.Double()),
        sa.Column("straggler_rank", sa.Integer()),
        sa.PrimaryKeyConstraint("source_key", "sequence", name="pk_step_samples"),
        sa.ForeignKeyConstraint(["source_key"], ["sample_sources.key"], name="fk_step_samples_source_key", ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_step_samples_run_key_warmup_step", "step_samples", ["run_key", "warmup", "step"])
    _seal_the_ledger()
    created_at = datetime.now(timezone.utc)
    if op.get_bind().dialect.name == "sqlite":
        created_at = created_at.replace(tzinfo=None)
    projects = sa.table("projects", sa.column("id"), sa.column("name"), sa.column("created_at", TIME))
    op.bulk_insert(projects, [{"id": "default", "name": "default", "created_at": created_at}])


def _seal_the_ledger() -> None:
    """Entries are never changed; they go only with their job."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            "CREATE TRIGGER ledger_is_immutable BEFORE UPDATE ON ledger "
            "BEGIN SELECT RAISE(ABORT, 'ledger entries are immutable'); END"
        )
        return
    op.execute(
        "CREATE FUNCTION refuse_ledger_update() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'ledger entries are immutable'; END $$"
    )
    op.execute(
        "CREATE TRIGGER ledger_is_immutable BEFORE UPDATE ON ledger "
        "FOR EACH ROW EXECUTE FUNCTION refuse_ledger_update()"
    )
    # Payloads are compressed already: trying again costs time and gains nothing.
    op.execute("ALTER TABLE telemetry_chunks ALTER COLUMN payload SET STORAGE EXTERNAL")


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was taken before the upgrade")
