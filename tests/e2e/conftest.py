"""Tests that need a cluster are left out, and the reason is told, where none can be built."""

from __future__ import annotations

import pytest

from tests.e2e import cluster, memory_limit, slurm

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
