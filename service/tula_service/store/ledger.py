"""The ledger: every recommendation as it was given, immutable, with the results of runs that followed it.

Beside it what jobs teach later jobs: posteriors by instance type, and predictions with what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import sqlalchemy as sa

from tula_service.store._base import Repository, RowMap, new_id, same_fields
from tula_service.store.records import (
    EarlierLessons,
    JobOutcome,
    JsonObject,
    LedgerOutcome,
    LedgerRecord,
    PredictionPairs,
)
from tula_service.store.tables import job_lessons, jobs, ledger, ledger_outcomes
from tula_wire import Configuration
from tula_wire.enums import Objective

_STEP_TIME = ("step_time_s", "step_time_low_s", "step_time_high_s")
_COST = ("cost_usd", "cost_low_usd", "cost_high_usd")
_SAME = {field.name for field in fields(LedgerRecord)} & set(ledger.c.keys())


class Ledger(Repository):
    """Recommendations and their outcomes; a trigger of the database refuses to update an entry."""

    def append(self, entry: LedgerRecord) -> LedgerRecord:
        """Write an entry; an empty id is given one."""
        entry = replace(entry, id=entry.id or new_id("rec"), created_at=entry.created_at or self._now())
        values: dict[str, Any] = {name: getattr(entry, name) for name in _SAME}
        values["configuration"] = None if entry.configuration is None else asdict(entry.configuration)
        for names, interval in ((_STEP_TIME, entry.predicted_step_time_s), (_COST, entry.predicted_cost_usd)):
            values |= dict(zip(names, interval or (None, None, None), strict=True))
        self._connection.execute(sa.insert(ledger).values(values))
        return entry

    def record_outcome(self, recommendation_id: str, outcome: LedgerOutcome) -> None:
        """Store what a run measured after this recommendation; a later measurement of the same run replaces it."""
        values = {
            "measured_step_time_s": outcome.measured_step_time_s,
            "error": outcome.error,
            "within_interval": outcome.within_interval,
            "at": outcome.at or self._now(),
        }
        insert = self._insert(ledger_outcomes).values(ledger_id=recommendation_id, run_id=outcome.run_id, **values)
        self._connection.execute(insert.on_conflict_do_update(index_elements=["ledger_id", "run_id"], set_=values))

    def list(self, job_id: str, *, followed: bool = False, limit: int = 200) -> Sequence[LedgerRecord]:
        """Entries of a job, newest first; one row for each outcome of an entry; `followed`: only those with one."""
        wanted = [ledger.c.job_id == job_id, *([ledger_outcomes.c.run_id.is_not(None)] if followed else [])]
        return self._records(*wanted, limit=limit)

    def latest(self, job_id: str, objective: Objective | None = None) -> LedgerRecord | None:
        """The newest entry of a job (for one objective)."""
        wanted = [ledger.c.job_id == job_id]
        if objective is not None:
            wanted.append(ledger.c.objective == objective)
        found = self._records(*wanted, limit=1)
        return found[0] if found else None

    def get(self, recommendation_id: str) -> LedgerRecord | None:
        """One entry by its id."""
        found = self._records(ledger.c.id == recommendation_id, limit=1)
        return found[0] if found else None

    def errors(self, *, limit: int = 1000) -> Sequence[float]:
        """Relative errors of the predictions whose outcome is known, over all jobs, newest first."""
        known = sa.select(ledger_outcomes.c.error).join(ledger, ledger.c.id == ledger_outcomes.c.ledger_id)
        newest = known.where(ledger_outcomes.c.error.is_not(None)).order_by(ledger.c.key.desc()).limit(limit)
        return self._connection.execute(newest).scalars().all()

    def outcomes(self, *, project_id: str | None = None, limit: int = 1000) -> Sequence[JobOutcome]:
        """Entries whose outcome is known, over all jobs (of a project), newest first, each with what its job says."""
        query = (
            sa.select(ledger, *_OUTCOME, jobs.c.name.label("job_name"), jobs.c.model_name, jobs.c.spec)
            .join(ledger_outcomes, ledger_outcomes.c.ledger_id == ledger.c.id)
            .join(jobs, jobs.c.id == ledger.c.job_id)
            .order_by(ledger.c.key.desc())
            .limit(limit)
        )
        if project_id is not None:
            query = query.where(jobs.c.project_id == project_id)
        return [
            JobOutcome(_record(row, _outcome(row)), row["job_name"], row["model_name"], row["spec"])
            for row in self._rows(query)
        ]

    def _records(self, *wanted: sa.ColumnElement[bool], limit: int) -> Sequence[LedgerRecord]:
        statement = (
            sa.select(ledger, *_OUTCOME)
            .outerjoin(ledger_outcomes, ledger_outcomes.c.ledger_id == ledger.c.id)
            .where(*wanted)
            .order_by(ledger.c.key.desc(), ledger_outcomes.c.at.desc())
            .limit(limit)
        )
        return [_record(row, _outcome(row)) for row in self._rows(statement)]


_OUTCOME = [
    ledger_outcomes.c.run_id.label("outcome_run_id"),
    ledger_outcomes.c.measured_step_time_s,
    ledger_outcomes.c.error,
    ledger_outcomes.c.within_interval,
    ledger_outcomes.c.at.label("outcome_at"),
]


def _outcome(row: RowMap) -> LedgerOutcome | None:
    if row["outcome_run_id"] is None:
        return None
    return LedgerOutcome(
        row["outcome_run_id"], row["measured_step_time_s"], row["error"], row["within_interval"], row["outcome_at"]
    )


def _interval(row: RowMap, names: Sequence[str]) -> tuple[float, float, float] | None:
    value, low, high = (row[name] for name in names)
    return None if value is None else (value, low, high)


def _record(row: RowMap, outcome: LedgerOutcome | None) -> LedgerRecord:
    values = same_fields(LedgerRecord, row) | {
        "configuration": None if row["configuration"] is None else Configuration(**row["configuration"]),
        "predicted_step_time_s": _interval(row, _STEP_TIME),
        "predicted_cost_usd": _interval(row, _COST),
        "outcome": outcome,
    }
    return LedgerRecord(**values)


class Lessons(Repository):
    """What jobs teach later jobs of their project; a job without a row has taught nothing yet."""

    def prediction_pairs(self, job_id: str) -> PredictionPairs:
        """(predicted, low, high, measured) step times of the job's trainings, newest first."""
        pairs = sa.select(job_lessons.c.prediction_pairs).where(job_lessons.c.job_id == job_id)
        return list(self._scalar(pairs) or ())

    def put_posteriors(self, job_id: str, posteriors: JsonObject) -> None:
        """Replace what the job learned, by instance type."""
        insert = self._insert(job_lessons).values(job_id=job_id, posteriors=posteriors, prediction_pairs=[])
        self._connection.execute(
            insert.on_conflict_do_update(index_elements=["job_id"], set_={"posteriors": posteriors})
        )

    def add_prediction_pair(self, job_id: str, pair: list[float], *, keep: int) -> None:
        """Prepend a pair and keep the newest `keep`; the caller holds the job's lock."""
        pairs = [pair, *self.prediction_pairs(job_id)][:keep]
        insert = self._insert(job_lessons).values(job_id=job_id, posteriors={}, prediction_pairs=pairs)
        self._connection.execute(
            insert.on_conflict_do_update(index_elements=["job_id"], set_={"prediction_pairs": pairs})
        )

    def of_earlier_jobs(self, project_id: str, *, before: int, limit: int) -> list[EarlierLessons]:
        """Lessons of those of the newest `limit` jobs before this cursor that have any, newest first.

        The number of jobs looked at is bounded, so that a large project costs no more.
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
        return [EarlierLessons(**row) for row in self._rows(statement)]
