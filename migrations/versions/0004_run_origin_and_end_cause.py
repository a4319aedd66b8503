"""Who asked for a run, and why one failed without a report of failure, as columns in place of sentences.

Revision ID: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_END_CAUSES = {
    "vanished": "Nothing was heard of this training since its lease ran out.",
    "superseded": "It ended without saying so%",
    "no_samples": "No sample arrived: the command ended without calling the agent.%",
}


def upgrade() -> None:
    op.add_column("runs", sa.Column("origin", sa.Text(), nullable=False, server_default="plan"))
    op.add_column("runs", sa.Column("end_cause", sa.Text()))
    runs = sa.table("runs", *(sa.column(name) for name in ("kind", "purpose", "state", "message", "origin", "end_cause")))
    by_user = (runs.c.kind == "train") | (runs.c.purpose == "Asked for by the user.")
    op.execute(sa.update(runs).where(by_user).values(origin="user"))
    for cause, message in _END_CAUSES.items():
        ended = runs.c.state.in_(["failed", "cancelled"]) & runs.c.message.like(message)
        op.execute(sa.update(runs).where(ended).values(end_cause=cause))


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was taken before the upgrade")
