"""What is known of a training's speed and time becomes columns of its run.

The sentence on a change of speed, whether the speed changed while the run was under way, and the time after which it ends
itself leave the state of its monitor, which keeps what only the next samples need. States of earlier snapshots are
brought to the present form.

Revision ID: 0010
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
COLUMNS = (sa.Column("drift_sentence", sa.Text()), sa.Column("time_limit_s", sa.Double()))
UNSTEADY = sa.Column("unsteady", sa.Boolean(), nullable=False, server_default=sa.false())
KEPT = ("detector", "low_s", "high_s", "restart_s", "checked_at", "announced", "alarm", "changed", "peak_bytes", "elapsed_s")
KEPT += ("spent_s", "spent_usd")

runs = sa.table(
    "runs",
    sa.column("key"),
    sa.column("drifted", sa.Boolean),
    sa.column("drift_state", JSON),
    sa.column("drift_sentence"),
    sa.column("unsteady", sa.Boolean),
    sa.column("time_limit_s"),
)


def upgrade() -> None:
    for column in (*COLUMNS, UNSTEADY):
        op.add_column("runs", column)
    connection = op.get_bind()
    stateless = runs.c.drift_state.is_(None)
    connection.execute(sa.update(runs).where(stateless, runs.c.drifted).values(unsteady=True))
    stored = connection.execute(sa.select(runs.c.key, runs.c.drifted, runs.c.drift_state).where(~stateless)).all()
    if stored:
        changed = [{"of": key, **columns_of(state, drifted)} for key, drifted, state in stored]
        connection.execute(sa.update(runs).where(runs.c.key == sa.bindparam("of")), changed)


def columns_of(state: dict[str, Any], drifted: bool) -> dict[str, Any]:
    sentence = state.get("sentence")
    unsteady = state.get("unsteady", sentence is not None or drifted)
    former = {"announced": state.get("said", []), "changed": unsteady or sentence is not None}
    return {
        "drift_sentence": sentence,
        "unsteady": unsteady,
        "time_limit_s": state.get("time_limit_s"),
        "drift_state": {name: value for name, value in (former | state).items() if name in KEPT},
    }


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was taken before the upgrade")
