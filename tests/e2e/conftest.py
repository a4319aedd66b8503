"""Provides one service for all end-to-end tests, and ends processes that a failed test leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.support.forked import Server
from tests.e2e.command import started


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one service for all tests of this folder; each test registers a separate job."""
    folder = tmp_path_factory.mktemp("service")
    with Server(f"sqlite:///{folder}/tula.db") as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """End processes that a failed test has left behind."""
    yield
    while started:
        process = started.pop()
        if process.poll() is None:
            process.kill()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
