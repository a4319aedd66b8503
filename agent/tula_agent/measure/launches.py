"""Counts the operations of a step, and measures the host's launch rate, which limits the speed at small batch sizes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from tula_agent.batches import tensors_in
from tula_agent.torch_private import AllocationTrace

_LAYERS, _WIDTH, _REPEATS = 50, 8, 4
MOST_NODES = 20_000
"""Maximum number of graph nodes to visit, which takes about 10 ms; in a larger graph, only this many are counted."""


def launch_time_s(device: torch.device) -> float:
    """Return how many seconds the host takes to launch an operation that is too small to keep `device` busy.

    The result is the shortest time of several forward and backward passes through fifty tiny layers, divided by the
    number of operations in a pass, counted as in `estimate_memory`. The measurement takes about 10 ms, draws no random
    numbers and keeps no memory.
    """
    network = _TinyNetwork(device)
    trace = AllocationTrace((network.weight, network.bias), {})
    with torch.enable_grad():
        with trace:
            network.step()
        return network.fastest_s() / trace.step_operations


def node_time_s(device: torch.device) -> float:
    """Return the launch time per node of the autograd graph in seconds, for the forward and backward pass together.

    `OperationCounter` counts the same nodes. The measurement takes as long as `launch_time_s`.
    """
    network = _TinyNetwork(device)
    with torch.enable_grad():
        nodes = count_nodes(network.forward())
        return network.fastest_s() / nodes


class _TinyNetwork:
    """A network of fifty layers that are too small to keep a device busy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.weight = torch.zeros(_WIDTH, _WIDTH, device=device, requires_grad=True)
        self.bias = torch.zeros(_WIDTH, device=device, requires_grad=True)

    def forward(self) -> torch.Tensor:
        x = torch.zeros(_WIDTH, _WIDTH, device=self._device)
        for _ in range(_LAYERS):
            x = F.relu(F.linear(x, self.weight, self.bias))
        return x.sum()

    def step(self) -> None:
        torch.autograd.grad(self.forward(), (self.weight, self.bias))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def fastest_s(self) -> float:
        self.step()
        return min(_time_step(self.step) for _ in range(_REPEATS))


def count_nodes(output: Any) -> int:
    """Return the number of nodes in the autograd graphs of the tensors in `output`, up to MOST_NODES."""
    stack = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    nodes: set[Any] = set()  # stores the nodes, so that no `id` is reused
    while stack and len(nodes) < MOST_NODES:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack += [following for following, _ in node.next_functions if following is not None]
    return len(nodes)


class OperationCounter:
    """Counts the operations of one step from the outputs of its models.

    Each model has a forward hook until `end` is called. If there are several models, only the model with the most
    operations counts, since its graph may contain the graphs of the others. A compiled model is one node, since its
    operations are already fused.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._counts: Counter[int] = Counter()  # by model, over the micro-steps
        self._hooks = [
            model.register_forward_hook(self._counting(number)) for number, model in enumerate(models)
        ]  # run during the forward pass, so they must not raise

    def end(self) -> int:
        """Remove the hooks and return the count; 0 if no model's output had a graph."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return max(self._counts.values(), default=0)

    def _counting(self, number: int) -> Callable[..., None]:
        def count(_model: Any, _inputs: Any, output: Any) -> None:
            try:
                self._counts[number] += count_nodes(output)
            except Exception:
                self._counts[number] += 0

        return count


def _time_step(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
