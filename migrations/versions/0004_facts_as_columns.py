"""Facts that were sentences or entries among cached answers become columns.

Who asked for a run, why one failed without a report of failure, how far threshold tuning has read a run's telemetry,
whether a plan is stale, what a job taught, and the error of its cross-validation. Thresholds become what users set and
what was tuned. What remains in the table of cached answers is nothing else.

Revision ID: 0004
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
END_CAUSES = {
    "vanished": "Nothing was heard of this training since its lease ran out.",
    "superseded": "It ended without saying so%",
    "no_samples": "No sample arrived: the command ended without calling the agent.%",
}
PLAN_STATES = {"yes": "stale", "out of memory": "stale_out_of_memory", "no": "current"}
TUNED = ("delta", "small_batch_size")

RUN_COLUMNS = ("id", "kind", "purpose", "state", "message", "origin", "end_cause", "scaling_step")
runs = sa.table("runs", *(sa.column(name) for name in RUN_COLUMNS))
jobs = sa.table(
    "jobs",
    sa.column("id", sa.Text),
    sa.column("plan_state", sa.Text),
    sa.column("cross_validated_error", sa.Double),
    sa.column("cross_validated_runs", JSON),
    sa.column("cross_validated_model", sa.Text),
)
job_lessons = sa.table(
    "job_lessons",
    sa.column("job_id", sa.Text),
    sa.column("posteriors", JSON),
    sa.column("prediction_pairs", JSON),
)
fits = sa.table("fits", *(sa.column(name, sa.Text) for name in ("job_id", "name", "model_version", "body")))
versions = sa.table("scaling_versions", sa.column("job_id"), sa.column("version"), sa.column("body", JSON))


def upgrade() -> None:
    op.add_column("runs", sa.Column("origin", sa.Text(), nullable=False, server_default="plan"))
    op.add_column("runs", sa.Column("end_cause", sa.Text()))
    op.add_column("runs", sa.Column("scaling_step", sa.BigInteger()))
    op.add_column("jobs", sa.Column("plan_state", sa.Text, nullable=False, server_default="current"))
    op.add_column("jobs", sa.Column("retried_up_to_key", BIG, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("cross_validated_error", sa.Double))
    op.add_column("jobs", sa.Column("cross_validated_runs", JSON))
    op.add_column("jobs", sa.Column("cross_validated_model", sa.Text))
    op.create_table(
        "job_lessons",
        sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("posteriors", JSON, nullable=False),
        sa.Column("prediction_pairs", JSON, nullable=False),
    )
    move_sentences()
    move_cached_facts(op.get_bind())
    move_thresholds(op.get_bind())
    op.rename_table("fits", "answers")


def move_sentences() -> None:
    by_user = (runs.c.kind == "train") | (runs.c.purpose == "Asked for by the user.")
    op.execute(sa.update(runs).where(by_user).values(origin="user"))
    for cause, message in END_CAUSES.items():
        ended = runs.c.state.in_(["failed", "cancelled"]) & runs.c.message.like(message)
        op.execute(sa.update(runs).where(ended).values(end_cause=cause))


def move_cached_facts(connection: sa.Connection) -> None:
    moved = fits.c.name.in_(("plan due", "lesson", "cross-validation", "tuning"))
    for job_id, name, model, text in connection.execute(sa.select(fits).where(moved)).all():
        job = sa.update(jobs).where(jobs.c.id == job_id)
        if name == "plan due":
            connection.execute(job.values(plan_state=PLAN_STATES.get(text, "stale")))
            continue
        body = json.loads(text)
        if name == "cross-validation":
            job = job.values(cross_validated_error=body["error"], cross_validated_runs=body["runs"])
            connection.execute(job.values(cross_validated_model=model))
        elif name == "tuning":
            connection.execute(sa.update(runs).where(runs.c.id == body["run_id"]).values(scaling_step=body["step"]))
        else:
            lessons = {"posteriors": body["types"], "prediction_pairs": body["pairs"]}
            connection.execute(sa.insert(job_lessons).values(job_id=job_id, **lessons))
    connection.execute(sa.delete(fits).where(moved))


def move_thresholds(connection: sa.Connection) -> None:
    tuned: dict[str, dict[str, Any]] = {}
    rows = connection.execute(sa.select(versions).order_by(versions.c.job_id, versions.c.version)).mappings().all()
    for row in rows:
        body = converted(row["body"], row["version"], tuned.get(row["job_id"], {}))
        tuned[row["job_id"]] = body["tuned"]
        key = (versions.c.job_id == row["job_id"]) & (versions.c.version == row["version"])
        connection.execute(sa.update(versions).where(key).values(body=body))


def converted(old: dict[str, Any], version: int, before: dict[str, Any]) -> dict[str, Any]:
    """A body with one pair of tuned numbers for both gated policies, and what users set by policy."""
    body = {name: value for name, value in old.items() if name != "policies"} | {"set": {}, "tuned": {}}
    for policy, own in old["policies"].items():
        by_user = dict(own.get("set", {}))
        if by_user.get("granularity") == "channel":
            by_user["granularity"] = "tensor"
        if by_user:
            body["set"][policy] = by_user
        numbers = {name: own[name] for name in TUNED if own.get(name) is not None}
        if policy in ("ags", "static") and numbers and not body["tuned"]:
            same = all(before.get(name) == own.get(name) for name in TUNED)
            mark = {"run_id": own.get("run_id"), "version": version, "from_step": own.get("from_step", 0)}
            earlier = {name: before.get(name) for name in TUNED}
            body["tuned"] = before if same else {**numbers, **mark, "before": earlier}
        if own.get("settled_by") is not None:
            body["rolled_back"] = own["settled_by"]
            body["tuned"] = {name: value for name, value in body["tuned"].items() if name in TUNED}
    return body


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was taken before the upgrade")
