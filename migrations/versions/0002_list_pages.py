"""Pages of jobs from one index: order, filters and count without a look at the jobs themselves.

Revision ID: 0002
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_jobs_listed", "jobs", ["project_id", "key", "state", "name", "model_name"])


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was taken before the upgrade")
