"""Timelines: when the gradients of each bucket were ready, as a process measured it.

Revision ID: 0007
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sample_sources", sa.Column("timeline", sa.JSON().with_variant(postgresql.JSONB(), "postgresql")))
