"""Provides a fixture that runs a job on several ranks, one process each, and collects the result of every rank.

The tensors in these tests are so small that a second thread per rank would only wait, for minutes on a busy machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agent.conftest import Done

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def results_of_ranks(alone: Callable[..., Done]) -> Callable[..., list[Any]]:
    """Return a function that runs a job and returns the result of each rank."""

    def run(world_size: int, job: Path, *arguments: str) -> list[Any]:
        (line,) = alone(job, *arguments, ranks=world_size).printed("RESULT ")
        return list(json.loads(line.removeprefix("RESULT ")))

    return run
