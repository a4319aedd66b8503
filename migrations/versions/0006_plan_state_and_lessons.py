"""Move plan state, lessons and validation error out of the table of cached answers.

Revision ID: 0006
"""

import json

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
PLAN_STATES = {"yes": "stale", "out of memory": "stale_out_of_memory", "no": "current"}

jobs = sa.table(
    "jobs",
    sa.column("id", sa.Text),
    sa.column("plan_state", sa.Text),
    sa.column("cross_validated_error", sa.Double),
    sa.column("cross_validated_runs", JSON),
)
job_lessons = sa.table(
    "job_lessons",
    sa.column("job_id", sa.Text),
    sa.column("posteriors", JSON),
    sa.column("prediction_pairs", JSON),
)
fits = sa.table("fits", sa.column("job_id", sa.Text), sa.column("name", sa.Text), sa.column("body", sa.Text))


def upgrade() -> None:
    op.add_column("jobs", sa.Column("plan_state", sa.Text, nullable=False, server_default="current"))
    op.add_column("jobs", sa.Column("retried_up_to_key", BIG, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("cross_validated_error", sa.Double))
    op.add_column("jobs", sa.Column("cross_validated_runs", JSON))
    op.create_table(
        "job_lessons",
        sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("posteriors", JSON, nullable=False),
        sa.Column("prediction_pairs", JSON, nullable=False),
    )
    connection = op.get_bind()
    moved = ("plan due", "lesson", "cross-validation")
    for row in connection.execute(sa.select(fits).where(fits.c.name.in_(moved))).mappings().all():
        job = sa.update(jobs).where(jobs.c.id == row["job_id"])
        if row["name"] == "plan due":
            connection.execute(job.values(plan_state=PLAN_STATES.get(row["body"], "stale")))
            continue
        body = json.loads(row["body"])
        if row["name"] == "cross-validation":
            connection.execute(job.values(cross_validated_error=body["error"], cross_validated_runs=body["runs"]))
        else:
            lessons = {"posteriors": body["types"], "prediction_pairs": body["pairs"]}
            connection.execute(sa.insert(job_lessons).values(job_id=row["job_id"], **lessons))
    connection.execute(sa.delete(fits).where(fits.c.name.in_(moved)))
    op.rename_table("fits", "answers")


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was taken before the upgrade")
