"""Stores the gradient-scaling values that users set, by job and policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from tula_service.store._base import Repository
from tula_service.store.tables import scaling_numbers


class Scaling(Repository):
    """The table of gradient-scaling values, with one row per job and policy for which values were set."""

    def read(self, job_id: str, policy: str) -> dict[str, Any] | None:
        """Return the values of a policy, including `version`, or None if they were never set."""
        kept = [column for column in scaling_numbers.c if column.name not in ("job_id", "policy")]
        row = self._row(sa.select(*kept).where(scaling_numbers.c.job_id == job_id, scaling_numbers.c.policy == policy))
        return None if row is None else dict(row)

    def write(self, job_id: str, policy: str, numbers: Mapping[str, Any]) -> None:
        """Replace the values of a policy, including `version`; the caller holds the job's lock."""
        self._put(scaling_numbers, {"job_id": job_id, "policy": policy}, numbers)
