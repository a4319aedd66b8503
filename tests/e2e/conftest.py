"""Tests that need a cluster are left out, and the reason is told, where none can be built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.support import cluster
from tests.e2e import memory_limit, slurm
from tests.e2e.command import started
from tests.support.server import Server, serving

REASONS = {
    "namespaces": cluster.why_not,
    "delay": cluster.why_no_delay,
    "slurm": slurm.why_not,
    "memory": memory_limit.why_not,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for kind, why_not in REASONS.items():
        needing = [item for item in items if (mark := item.get_closest_marker("cluster")) and mark.args[0] == kind]
        reason = why_not() if needing else None
        if reason is not None:
            items[:] = [item for item in items if item not in needing]
            config.hook.pytest_deselected(items=needing)
            print(f"\n{len(needing)} tests are left out: {reason}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One service for all of these; each has a job of its own."""
    folder = tmp_path_factory.mktemp("service")
    with serving(f"sqlite:///{folder}/tula.db") as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What a failed test leaves behind is ended."""
    yield
    while started:
        process = started.pop()
        if process.poll() is None:
            process.kill()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
