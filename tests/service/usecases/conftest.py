"""Provides a cluster with a known step time, on an embedded database."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.service.usecases.cluster import Cluster
from tests.support.clock import ManualClock
from tula_service.store import Store


@pytest.fixture
def cluster(sqlite_store: Store) -> Cluster:
    """Return a cluster with the step time `overlapping`."""
    return Cluster(sqlite_store)


@pytest.fixture(scope="session")
def profiled_database(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cluster, str]:
    """Create the database of a job whose plan is done; return its path, the cluster (store closed) and the job's id."""
    path = tmp_path_factory.mktemp("profiled") / "tula.db"
    shutil.copy(sqlite_template, path)
    store = Store.open(f"sqlite:///{path}", now=ManualClock())
    cluster = Cluster(store)
    job_id = cluster.register().job.id
    cluster.work(job_id)
    store.close()
    return path, cluster, job_id


@pytest.fixture
def profiled(
    profiled_database: tuple[Path, Cluster, str],
    sqlite_url: str,
    clock: ManualClock,
    open_store: Callable[..., Store],
) -> tuple[Cluster, str]:
    """Return the cluster and id of a job whose plan is done, in a separate copy of `profiled_database`."""
    path, before, job_id = profiled_database
    shutil.copy(path, sqlite_url.removeprefix("sqlite:///"))
    cluster = Cluster(open_store(sqlite_url, now=clock))
    cluster.random, cluster.sequence, cluster.ran = copy.deepcopy((before.random, before.sequence, before.ran))
    return cluster, job_id
