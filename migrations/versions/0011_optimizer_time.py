"""How long the optimizer of a step took, apart from what a step repeats with each accumulated micro-step.

Rows of earlier agents have no such time: null. Both databases add the columns without rewriting rows.

Revision ID: 0011
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("step_samples", "run_summaries"):
        op.add_column(table, sa.Column("optimizer_time_s", sa.Double()))


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was taken before the upgrade")
