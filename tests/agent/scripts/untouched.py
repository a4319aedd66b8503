"""Prints what a measured and scaled training run has changed in its process; the script itself changes none of it."""

from __future__ import annotations

import hashlib
import locale
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy
import torch

import tula_agent
from tula_agent.scaling import TulaOptimizer


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def files() -> list[str]:
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            opened.append(str(link.readlink()))
    return sorted(path for path in opened if not path.endswith("/fd"))


def parameter_hooks() -> list[list[int]]:
    tensors = list(model.parameters())
    on_gradients = [list(tensor._backward_hooks or ()) for tensor in tensors]
    return on_gradients + [list(tensor._post_accumulate_grad_hooks or ()) for tensor in tensors]


def module_hooks() -> list[str]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    return [repr(getattr(module, kind)) for module in model.modules() for kind in kinds]


def handlers() -> list[str]:
    return [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())]


LOOKS: dict[str, Callable[[], object]] = {
    "random": random.getstate,
    "numpy": lambda: numpy.random.get_state()[1].tolist(),  # type: ignore[union-attr, index]
    "torch": lambda: torch.get_rng_state().tolist(),
    "signals": handlers,
    "environment": lambda: sorted(pair for pair in os.environ.items() if pair[0] != "TULA_MEASURED_BY"),
    "files": files,
    "folder": lambda: sorted(map(str, Path.cwd().rglob("*"))),
    "threads": lambda: sorted(thread.name for thread in threading.enumerate()),
    "warnings": lambda: warnings.filters,
    "locale": lambda: (locale.setlocale(locale.LC_ALL), os.umask(os.umask(0o22))),
    "torch's settings": lambda: (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
    ),
    "hooks on parameters": parameter_hooks,
    "hooks on modules": module_hooks,
}


def train() -> None:
    optimizer = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), global_batch_size=8, small_batch_size=4)
    run = tula_agent.init()
    run.watch(model, optimizer)
    for number, batch in enumerate(run.steps(batches)):
        model(batch).square().mean().backward()
        run.log(loss=1.0)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    run.finish()


os.chdir(sys.argv[1])
model = torch.nn.Linear(4, 1)
batches = [torch.randn(4, 4) for _ in range(40)]
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1).step()  # torch imports much of itself at the first step
before = {name: digest(look()) for name, look in LOOKS.items()}
train()
for name, look in LOOKS.items():
    if digest(look()) != before[name]:
        print("changed", name)
print("looked at", len(LOOKS))
