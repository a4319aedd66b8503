"""Tests that pages of samples contain each row of a job once, in order, with any page size and filter."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from tests.service.store.examples import a_job, a_run, samples
from tula_service.errors import InvalidInput, NotFound
from tula_service.store import Store
from tula_service.store import samples as stored_samples
from tula_service.usecases.access import ANONYMOUS, Principal
from tula_service.usecases.samples import SampleQuery, list_samples
from tula_wire import StepSample

ROWS = 7
PROCESSES = ((0, "a", False), (1, "a", True), (0, "b", False))


@pytest.fixture
def filled(store: Store) -> tuple[str, list[str]]:
    """Create a job with two runs of three processes each, and another job; return the first job and its runs."""
    made: dict[str, list[str]] = {}
    for name in ("other", "job"):
        job = a_job(store, name=name)
        for _ in range(2):
            run = a_run(store, job.id)
            made.setdefault(job.id, []).append(run.id)
            for rank, boot_id, warmup in PROCESSES:
                with store.transaction() as tx:
                    tx.samples.add(run.key, job.id, samples(ROWS, rank=rank, boot_id=boot_id, warmup=warmup))
    return job.id, made[job.id]


def everything(store: Store, job_id: str, *, limit: int, **narrowed: object) -> list[StepSample]:
    """Return the rows of all pages."""
    found: list[StepSample] = []
    cursor: str | None = None
    while True:
        query = SampleQuery(**narrowed, cursor=cursor, limit=limit)  # type: ignore[arg-type]
        page = list_samples(store, ANONYMOUS, job_id, query)
        assert len(page.samples) <= limit
        found += page.samples
        cursor = page.next_cursor
        if cursor is None:
            return found


@pytest.mark.parametrize("limit", [1, 5, 7, 8, 1000])
def test_pages_of_any_size_hold_every_row_once(store: Store, filled: tuple[str, list[str]], limit: int) -> None:
    job_id, run_ids = filled
    found = everything(store, job_id, limit=limit)
    assert [(one.run_id, one.rank, one.boot_id, one.sequence) for one in found] == [
        (run_id, rank, boot_id, number)
        for run_id in run_ids
        for rank, boot_id, _ in PROCESSES
        for number in range(ROWS)
    ]


def test_a_row_is_what_was_sent(store: Store, filled: tuple[str, list[str]]) -> None:
    job_id, run_ids = filled
    first, second, *_ = everything(store, job_id, limit=100)
    assert (first.run_id, first.step, first.step_time_s) == (run_ids[0], 0, 0.5)
    assert (first.compute_time_s, first.straggler_rank) == (None, None), "not measured is null, never NaN"
    assert (second.compute_time_s, second.straggler_rank, second.warmup) == (0.25, 1, False)


def test_filters_narrow_and_pages_go_on_within_them(store: Store, filled: tuple[str, list[str]]) -> None:
    job_id, run_ids = filled
    discarded = everything(store, job_id, limit=3, warmup=True)
    assert [one.rank for one in discarded] == [1] * 2 * ROWS
    narrow = everything(store, job_id, limit=2, run_id=run_ids[1], rank=0, first_step=2, last_step=4)
    assert [(one.run_id, one.boot_id, one.step) for one in narrow] == [
        (run_ids[1], boot_id, step) for boot_id in ("a", "b") for step in (2, 3, 4)
    ]
    assert everything(store, job_id, limit=9, run_id="run-nowhere") == []


def test_a_filter_that_matches_nothing_reads_no_more_a_page_than_one_that_does(
    store: Store, filled: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows a job has, a page ends after reading its share, and the next page continues."""
    monkeypatch.setattr(stored_samples, "MOST_READ", 10)
    monkeypatch.setattr(stored_samples, "MOST_PROCESSES", 4)
    asked: list[str] = []
    sa.event.listen(store.engine, "before_cursor_execute", lambda _c, _k, said, *_: asked.append(said))
    job_id, _ = filled
    cursor, statements = None, []
    while True:
        asked.clear()
        page = list_samples(store, ANONYMOUS, job_id, SampleQuery(first_step=1000, cursor=cursor, limit=100))
        statements.append(sum("step_samples" in said for said in asked))
        assert page.samples == []
        cursor = page.next_cursor
        if cursor is None:
            break
    assert len(statements) >= 2 * 3 * ROWS // 10, "42 rows are read in tens"
    assert max(statements) <= 2 * 4
    narrow = everything(store, job_id, limit=100, last_step=ROWS - 1)
    assert len(narrow) == 2 * 3 * ROWS, "and nothing is left out on the way"
    assert len(everything(store, job_id, limit=100)) == 2 * 3 * ROWS, "with more processes than a page looks into"


def test_strangers_and_nonsense_are_refused(store: Store, filled: tuple[str, list[str]]) -> None:
    job_id, _ = filled
    stranger = Principal("stranger", "user", project_id="elsewhere")
    with pytest.raises(NotFound):
        list_samples(store, stranger, job_id, SampleQuery())
    for cursor in ("", "1", "1-", "-1-2", "1-2-3", "x-y", "9" * 19 + "-1"):
        with pytest.raises(InvalidInput, match="next_cursor"):
            list_samples(store, ANONYMOUS, job_id, SampleQuery(cursor=cursor))
