"""accelerate's `find_executable_batch_size`: from a batch downwards until one does not run out of memory."""

from __future__ import annotations

import importlib

import torch
from accelerate.utils import find_executable_batch_size
from largest import answer


def on_limit(least: int, largest: int) -> tuple[int, int]:  # noqa: ARG001
    """Memory ends above `largest`; the search starts at twice that."""
    tried = []

    @find_executable_batch_size(starting_batch_size=2 * largest)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > largest:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    return train(), len(tried)


def on_digits(least: int, largest: int) -> tuple[int, int]:  # noqa: ARG001
    """An epoch of the digits."""
    script = importlib.import_module("digits")
    data, tried = script.digits()[0], []

    # user
    @find_executable_batch_size(starting_batch_size=largest)
    def train(batch_size: int) -> int:
        # end
        tried.append(batch_size)
        model = script.network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in torch.utils.data.DataLoader(data, batch_size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return batch_size

    # user
    return train(), len(tried)
    # end


if __name__ == "__main__":
    answer(on_limit, on_digits)
