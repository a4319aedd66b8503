"""Outputs: the end of what a run has written.

Revision ID: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "run_outputs",
        sa.Column(
            "run_key", sa.BigInteger().with_variant(sa.Integer, "sqlite"), autoincrement=False, nullable=False
        ),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_key", name="pk_run_outputs"),
        sa.ForeignKeyConstraint(["run_key"], ["runs.key"], name="fk_run_outputs_run_key", ondelete="CASCADE"),
    )
