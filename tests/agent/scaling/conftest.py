"""Jobs of several ranks that say what each has found, in processes of their own.

Tensors here are tiny: a second thread would only wait for the first, for minutes on a busy machine.
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
def said_by(alone: Callable[..., Done]) -> Callable[..., list[Any]]:
    """What a job says of each rank."""

    def run(world_size: int, job: Path, *arguments: str) -> list[Any]:
        (line,) = alone(job, *arguments, ranks=world_size).printed("RESULT ")
        return list(json.loads(line.removeprefix("RESULT ")))

    return run
