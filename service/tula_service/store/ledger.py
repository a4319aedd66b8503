"""Stores the ledger: all recommendations sent to users, which never change, and results of runs that followed them.

This module also stores the results of a job that later jobs can use: its posteriors by instance type, and its
predictions with the values measured later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from pydantic import Field

from tula_service.domain import JsonObject, PredictionPairs
from tula_service.store._base import Repository, RowMap, new_id
from tula_service.store.tables import job_lessons, jobs, ledger, ledger_outcomes
from tula_wire import Configuration, Estimate, LedgerEntry
from tula_wire.enums import Objective

_STEP_TIME = ("step_time_s", "step_time_low_s", "step_time_high_s")
_COST = ("cost_usd", "cost_low_usd", "cost_high_usd")
_OUTCOME = [ledger_outcomes.c[name] for name in ("run_id", "measured_step_time_s", "error", "within_interval")]


class LedgerRecord(LedgerEntry):
    """A recommendation as sent to the user, with the measured result of one run that followed it, if any.

    `interval_scale` is the factor by which calibration had widened the prediction interval of the step time, or None if
    no factor was recorded.
    """

    recommendation_id: str = Field(default_factory=lambda: new_id("rec"))
    job_id: str
    data_version: int
    interval_scale: float | None = None


_SAME = LedgerRecord.model_fields.keys() & set(ledger.c.keys())


class Ledger(Repository):
    """The tables of recommendations and their outcomes; a database trigger prevents updates of recommendations."""

    def append(self, entry: LedgerRecord) -> None:
        """Append an entry to the ledger."""
        values: dict[str, Any] = {name: getattr(entry, name) for name in _SAME} | {"id": entry.recommendation_id}
        values["configuration"] = None if entry.configuration is None else entry.configuration.as_json()
        for names, estimate in ((_STEP_TIME, entry.predicted_step_time_s), (_COST, entry.predicted_cost_usd)):
            values |= dict(zip(names, dict(estimate or ()).values() or [None] * 3, strict=True))
        self._connection.execute(sa.insert(ledger).values(values))

    def record_outcome(
        self, recommendation_id: str, run_id: str, measured_step_time_s: float, *, error: float, within_interval: bool
    ) -> None:
        """Store the result of a run that followed this recommendation, replacing any earlier result of the same run."""
        values = {"measured_step_time_s": measured_step_time_s, "error": error, "within_interval": within_interval}
        key = {"ledger_id": recommendation_id, "run_id": run_id}
        self._put(ledger_outcomes, key, values | {"at": self._now()})

    def list(self, job_id: str, *, followed: bool = False, limit: int = 200) -> Sequence[LedgerRecord]:
        """Return a job's entries, newest first; with `followed=True`, only entries that have an outcome.

        An entry with several outcomes is returned once for each outcome.
        """
        conditions = [ledger.c.job_id == job_id, *([ledger_outcomes.c.run_id.is_not(None)] if followed else [])]
        return self._records(*conditions, limit=limit)

    def latest(self, job_id: str, objective: Objective | None = None) -> LedgerRecord | None:
        """Return the job's newest entry (optionally, only for one objective), or None if there is no entry."""
        conditions = [ledger.c.job_id == job_id]
        if objective is not None:
            conditions.append(ledger.c.objective == objective)
        return next(iter(self._records(*conditions, limit=1)), None)

    def get(self, recommendation_id: str) -> LedgerRecord | None:
        """Return the entry with this id, or None."""
        return next(iter(self._records(ledger.c.id == recommendation_id, limit=1)), None)

    def errors(self, *, limit: int = 1000) -> Sequence[float]:
        """Return the relative errors of the newest predictions with known outcomes over all jobs, newest first."""
        errors = sa.select(ledger_outcomes.c.error).join(ledger, ledger.c.id == ledger_outcomes.c.ledger_id)
        newest = errors.where(ledger_outcomes.c.error.is_not(None)).order_by(ledger.c.key.desc()).limit(limit)
        return self._connection.execute(newest).scalars().all()

    def outcomes(
        self, *, project_id: str | None = None, limit: int = 1000
    ) -> Sequence[tuple[LedgerRecord, str, str, JsonObject]]:
        """Return the newest entries with an outcome, over all jobs or the jobs of a project, newest first.

        Each entry is returned with its job's name, model name and specification.
        """
        query = (
            sa.select(ledger, *_OUTCOME, jobs.c.name.label("job_name"), jobs.c.model_name, jobs.c.spec)
            .join(ledger_outcomes, ledger_outcomes.c.ledger_id == ledger.c.id)
            .join(jobs, jobs.c.id == ledger.c.job_id)
            .order_by(ledger.c.key.desc())
            .limit(limit)
        )
        if project_id is not None:
            query = query.where(jobs.c.project_id == project_id)
        return [(_record(row), row["job_name"], row["model_name"], row["spec"]) for row in self._rows(query)]

    def _records(self, *conditions: sa.ColumnElement[bool], limit: int) -> Sequence[LedgerRecord]:
        statement = (
            sa.select(ledger, *_OUTCOME)
            .outerjoin(ledger_outcomes, ledger_outcomes.c.ledger_id == ledger.c.id)
            .where(*conditions)
            .order_by(ledger.c.key.desc(), ledger_outcomes.c.at.desc())
            .limit(limit)
        )
        return [_record(row) for row in self._rows(statement)]


def _estimate(row: RowMap, names: Sequence[str]) -> Estimate | None:
    value, low, high = (row[name] for name in names)
    return None if value is None else Estimate.model_construct(value=value, low=low, high=high)


def _record(row: RowMap) -> LedgerRecord:
    """Return the record for a row, without validation, since the row was valid when it was stored."""
    values = {name: row[name] for name in LedgerRecord.model_fields if name in row} | {
        "configuration": None if row["configuration"] is None else Configuration.from_json(row["configuration"]),
        "predicted_step_time_s": _estimate(row, _STEP_TIME),
        "predicted_cost_usd": _estimate(row, _COST),
    }
    return LedgerRecord.model_construct(recommendation_id=row["id"], **values)


class PosteriorStore(Repository):
    """Stores the results of jobs for use by the project's later jobs; jobs without results have no row."""

    def prediction_pairs(self, job_id: str) -> PredictionPairs:
        """Return the step times [predicted, low, high, measured] of each of the job's training runs, newest first."""
        pairs = sa.select(job_lessons.c.prediction_pairs).where(job_lessons.c.job_id == job_id)
        return list(self._scalar(pairs) or ())

    def put_posteriors(self, job_id: str, posteriors: JsonObject) -> None:
        """Replace the job's posteriors, keyed by instance type."""
        self._put(job_lessons, {"job_id": job_id}, {"posteriors": posteriors}, prediction_pairs=[])

    def add_prediction_pair(self, job_id: str, pair: list[float], *, keep: int) -> None:
        """Prepend a prediction with its measurement; keep the newest `keep` pairs. The caller holds the job's lock."""
        pairs = [pair, *self.prediction_pairs(job_id)][:keep]
        self._put(job_lessons, {"job_id": job_id}, {"prediction_pairs": pairs}, posteriors={})

    def of_earlier_jobs(self, project_id: str, *, before: int, limit: int) -> list[RowMap]:
        """Return specifications, posteriors and prediction pairs of the project's jobs before a cursor, newest first.

        Jobs without results are omitted. Only the newest `limit` jobs are read, so that the cost does not grow with
        the project.
        """
        newest = (
            sa.select(jobs.c.key, jobs.c.id)
            .where(jobs.c.project_id == project_id, jobs.c.key < before)
            .order_by(jobs.c.key.desc())
            .limit(limit)
            .subquery("newest")
        )
        statement = (
            sa.select(jobs.c.spec, job_lessons.c.posteriors, job_lessons.c.prediction_pairs)
            .join(newest, newest.c.key == jobs.c.key)
            .join(job_lessons, job_lessons.c.job_id == newest.c.id)
            .order_by(newest.c.key.desc())
        )
        return self._rows(statement)
