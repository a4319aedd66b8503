"""A known cluster on an embedded database."""

from __future__ import annotations

import pytest

from tests.service.usecases.cluster import Cluster
from tula_service.store import Store


@pytest.fixture
def cluster(sqlite_store: Store) -> Cluster:
    """A cluster whose truth is `overlapping`."""
    return Cluster(sqlite_store)


@pytest.fixture
def profiled(cluster: Cluster) -> tuple[Cluster, str]:
    """A job whose plan is done."""
    job_id = cluster.register().job.id
    cluster.work(job_id)
    return cluster, job_id
