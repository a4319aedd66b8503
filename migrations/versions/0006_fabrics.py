"""Fabrics: what probes measured of the links of an instance type.

Revision ID: 0006
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "fabrics",
        sa.Column("key", sa.BigInteger().with_variant(sa.Integer, "sqlite"), autoincrement=True, nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("instance_type", sa.Text(), nullable=False),
        sa.Column("probe", sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_fabrics"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_fabrics_project_id", ondelete="CASCADE"),
    )
    op.create_index(
        "ix_fabrics_project_id_instance_type_key", "fabrics", ["project_id", "instance_type", "key"]
    )
