"""Thresholds of a job as set and tuned numbers, and how far telemetry was looked at as a column of runs.

Revision ID: 0005
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
_TUNED = ("delta", "small_batch_size")


def upgrade() -> None:
    op.add_column("runs", sa.Column("scaling_step", sa.BigInteger()))
    connection = op.get_bind()
    fits = sa.table("fits", sa.column("name"), sa.column("body"))
    runs = sa.table("runs", sa.column("id"), sa.column("scaling_step"))
    for (kept,) in connection.execute(sa.select(fits.c.body).where(fits.c.name == "tuning")).all():
        mark = json.loads(kept)
        connection.execute(sa.update(runs).where(runs.c.id == mark["run_id"]).values(scaling_step=mark["step"]))
    connection.execute(sa.delete(fits).where(fits.c.name == "tuning"))
    versions = sa.table("scaling_versions", sa.column("job_id"), sa.column("version"), sa.column("body", _JSON))
    tuned: dict[str, dict[str, Any]] = {}
    rows = connection.execute(sa.select(versions).order_by(versions.c.job_id, versions.c.version)).mappings().all()
    for row in rows:
        body = _converted(row["body"], row["version"], tuned.get(row["job_id"], {}))
        tuned[row["job_id"]] = body["tuned"]
        key = (versions.c.job_id == row["job_id"]) & (versions.c.version == row["version"])
        connection.execute(sa.update(versions).where(key).values(body=body))


def _converted(old: dict[str, Any], version: int, before: dict[str, Any]) -> dict[str, Any]:
    """A body with one pair of tuned numbers for both gated policies, and what users set by policy."""
    body = {name: value for name, value in old.items() if name != "policies"} | {"set": {}, "tuned": {}}
    for policy, own in old["policies"].items():
        by_user = dict(own.get("set", {}))
        if by_user.get("granularity") == "channel":
            by_user["granularity"] = "tensor"
        if by_user:
            body["set"][policy] = by_user
        numbers = {name: own[name] for name in _TUNED if own.get(name) is not None}
        if policy in ("ags", "static") and numbers and not body["tuned"]:
            same = all(before.get(name) == own.get(name) for name in _TUNED)
            mark = {"run_id": own.get("run_id"), "version": version, "from_step": own.get("from_step", 0)}
            earlier = {name: before.get(name) for name in _TUNED}
            body["tuned"] = before if same else {**numbers, **mark, "before": earlier}
        if own.get("settled_by") is not None:
            body["rolled_back"] = own["settled_by"]
            body["tuned"] = {name: value for name, value in body["tuned"].items() if name in _TUNED}
    return body


def downgrade() -> None:
    raise NotImplementedError("restore the backup that was taken before the upgrade")
