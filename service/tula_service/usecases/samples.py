"""Reading step samples back, row by row, for whoever wants to look for themselves."""

from __future__ import annotations

import re
from typing import Final

from tula_service.errors import InvalidInput
from tula_service.store import Store
from tula_service.store.sample_reader import SampleCursor, SampleFilter
from tula_service.usecases.access import Principal, visible_job
from tula_wire import SamplePage, StepSample

__all__ = ["SampleFilter", "list_samples"]

_CURSOR: Final = re.compile(r"(\d{1,18})-(\d{1,18})", re.ASCII)


def list_samples(
    store: Store,
    principal: Principal,
    job_id: str,
    wanted: SampleFilter,
    *,
    cursor: str | None = None,
    limit: int = 500,
) -> SamplePage:
    """Samples of a job's runs, process after process. Raises NotFound, and InvalidInput for a cursor that is none."""
    after = None if cursor is None else _parsed(cursor)
    if wanted.run_id is not None and not wanted.run_id.isprintable():
        raise InvalidInput("run_id holds characters that no id has: use one of the job's runs.", field="run_id")
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        rows, following = tx.sample_reader.page(job_id, wanted, cursor=after, limit=limit)
    samples = [StepSample(**{name: row[name] for name in StepSample.model_fields}) for row in rows]
    return SamplePage(samples=samples, next_cursor=None if following is None else f"{following[0]}-{following[1]}")


def _parsed(cursor: str) -> SampleCursor:
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise InvalidInput("cursor must be the next_cursor of a page: leave it out to begin.", field="cursor")
    return int(found[1]), int(found[2])
