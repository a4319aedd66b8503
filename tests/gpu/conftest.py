"""Tests of the agent on a real accelerator: `make test-gpu`. They are skipped where torch sees none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.agent.sink import Sink, start


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need an accelerator where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device: `make test-gpu` needs one"))


@pytest.fixture
def device() -> torch.device:
    """The accelerator under test, without what earlier tests left on it."""
    torch.cuda.empty_cache()
    return torch.device("cuda")


@pytest.fixture
def sink() -> Iterator[Sink]:
    """A service that takes everything that the agent sends."""
    made = Sink()
    server = start(made)
    yield made
    made.released.set()
    server.shutdown()
    server.server_close()
