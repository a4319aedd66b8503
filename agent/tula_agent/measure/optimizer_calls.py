"""Counts the steps of optimizers that the script gives nothing to watch."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerCalls:
    """How often any optimizer of this process has stepped, until `stop`."""

    def __init__(self) -> None:
        self.count = 0
        counted = weakref.ref(self)

        def step(*_: Any) -> None:
            calls = counted()
            if calls is not None:
                calls.count += 1

        self._hook = register_optimizer_step_post_hook(step)

    def stop(self) -> None:
        """Count no more. Not to be called by an optimizer's hook: torch iterates over them."""
        self._hook.remove()
