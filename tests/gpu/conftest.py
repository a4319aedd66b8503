"""Provides a real accelerator for tests of the agent (`make test-gpu`), which are skipped if torch has none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.agent.sink import Sink, start


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need an accelerator if there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device: `make test-gpu` needs one"))


@pytest.fixture
def device() -> torch.device:
    """Return the accelerator under test, after releasing the memory that earlier tests have cached."""
    torch.cuda.empty_cache()
    return torch.device("cuda")


@pytest.fixture
def sink() -> Iterator[Sink]:
    """Start a service that accepts everything that the agent sends."""
    made = Sink()
    server = start(made)
    yield made
    made.released.set()
    server.shutdown()
    server.server_close()
