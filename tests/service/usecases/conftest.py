"""A known cluster on an embedded database."""

from __future__ import annotations

import pytest

from tests.service.usecases.cluster import Cluster
from tula_service.store import Store


@pytest.fixture
def cluster(sqlite_store: Store) -> Cluster:
    """A cluster whose truth is `overlapping`."""
    return Cluster(sqlite_store)
