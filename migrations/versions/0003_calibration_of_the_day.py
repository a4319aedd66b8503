"""What the ledger's intervals were widened by, kept with each entry: the calibration of a later day is another.

Revision ID: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ledger", sa.Column("interval_scale", sa.Double()))


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was taken before the upgrade")
