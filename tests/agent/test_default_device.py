"""Tests that the agent's tensors do not follow the script's `torch.set_default_device`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tula_agent

CONSTRUCTORS = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
}
CONSTRUCTORS |= {"Generator"}


def without_a_device(source: str) -> Iterator[int]:
    """Yield the lines on which a tensor is created on the default device."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CONSTRUCTORS:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and "device" not in {keyword.arg for keyword in node.keywords}:
                yield node.lineno


def test_every_tensor_that_the_agent_makes_says_its_device():
    folder = Path(tula_agent.__file__).parent
    places = [f"{path.name}:{line}" for path in folder.rglob("*.py") for line in without_a_device(path.read_text())]
    assert places == []
    assert list(without_a_device("x = 1\ny = torch.zeros(3)\nz = torch.zeros(3, device=d)")) == [2]
