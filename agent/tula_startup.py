"""Installs a start-up hook that measures a launched script if the script does not import the agent.

`tula.pth`, which is installed next to the packages, makes Python import this module at start-up if TULA_RUN_ID or
TULA_JOB is in the environment, regardless of the launcher; otherwise, the file costs only two look-ups. The hook does
nothing until torch is imported and an optimizer has stepped, and it ignores the steps of a script that imports
`tula_agent`. This module is therefore outside that package. If the script imports accelerate, the hook also records
when accelerate lowers the batch size after an out-of-memory error, since the steps do not show the cause. The hook
raises only `SystemExit`, to end a profiling run.

Lightning's Trainers load their callback from an entry point, `lightning_callbacks`, in every process. The callback
imports the agent, so the hook then ignores the optimizer's steps.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any

lowered_for: list[str] = []
"""The last out-of-memory error after which accelerate lowered the script's batch size; empty until there is one."""


class WhenImported:
    """Import hook that passes certain modules to functions right after Python has imported them; it imports no module
    itself.
    """

    def __init__(self, functions: dict[str, Callable[[Any], None]]) -> None:
        self._functions = functions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name not in self._functions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            with contextlib.suppress(Exception):
                self._functions.pop(name)(module)
                if not self._functions:
                    sys.meta_path.remove(self)

        with contextlib.suppress(Exception):
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def see_steps(optimizers: Any) -> None:
    """Register a `Stepped` to run after each step of every optimizer; `optimizers` is the module
    `torch.optim.optimizer`.
    """
    optimizers.register_optimizer_step_post_hook(Stepped())


def see_out_of_memory(memory: Any) -> None:
    """Record the exceptions that accelerate treats as out-of-memory errors, after which it lowers the batch size.

    `find_executable_batch_size`, which the Trainer's `auto_find_batch_size` uses, catches these exceptions itself.
    """
    judge = memory.should_reduce_batch_size

    @functools.wraps(judge)
    def judged(exception: Exception) -> Any:
        lowers = judge(exception)
        if lowers:
            with contextlib.suppress(Exception):
                lowered_for[:] = [f"{type(exception).__name__}: {exception}"]
        return lowers

    memory.should_reduce_batch_size = judged


class Stepped:
    """Hook that runs after each optimizer step; raises only `SystemExit`, once a profiling run has enough samples."""

    def __init__(self) -> None:
        self._stepped: Any = None
        self._aside = False

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if self._aside:
            return
        try:
            if self._stepped is None:
                if "tula_agent" in sys.modules:  # the script does its own measuring
                    self._aside = True
                    return
                self._stepped = importlib.import_module("tula_agent.unedited").stepped
            self._stepped(optimizer)
        except Exception as error:
            self._aside = True
            print(f"tula: measurement stopped after an error, but training continues: {error!r}", file=sys.stderr)


@functools.cache
def _lightning_callback() -> Any:
    """Return the callback class, or None if the script imports the agent and so measures itself."""
    if "tula_agent" in sys.modules:
        return None
    return importlib.import_module("tula_agent.callbacks.lightning").UneditedCallback


def lightning_callbacks() -> list[Any]:
    """Return the callbacks that Lightning adds to each Trainer: one that measures `fit`, or none if no run was
    launched.
    """
    try:
        callback = _lightning_callback() if _LAUNCHED else None
        return [callback()] if callback else []
    except Exception as error:
        print(f"tula: Lightning's Trainer cannot be measured, but training continues: {error!r}", file=sys.stderr)
        return []


_FUNCTIONS = {"torch.optim.optimizer": see_steps, "accelerate.utils.memory": see_out_of_memory}
_LAUNCHED = bool(os.environ.get("TULA_RUN_ID") or os.environ.get("TULA_JOB"))
if _LAUNCHED:
    sys.meta_path.insert(0, WhenImported(_FUNCTIONS))
