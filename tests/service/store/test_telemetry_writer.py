"""Group commit where no thread is to be had for it."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import Mock

import pytest

from tests.service.store.examples import a_chunk, a_job, a_run
from tula_service.store import Store
from tula_service.store.telemetry import chunk_row
from tula_service.store.telemetry_writer import TelemetryWriter


def test_a_chunk_for_which_no_thread_was_to_be_had_is_refused_and_the_next_is_stored(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(sqlite_store, a_job(sqlite_store).id)
    row, writer = chunk_row(run.key, a_chunk(0, 5)), TelemetryWriter(sqlite_store)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="new thread"):
            asyncio.run(writer.add(run.id, row))
    # Stored as new: nothing of the first was left waiting.
    assert asyncio.run(asyncio.wait_for(writer.add(run.id, row), 30))
    writer.close()
