"""Start-up hook of a launched script: measures one that does not import the agent, under any launcher.

`tula.pth`, beside the installed packages, has Python import this module when it starts with TULA_RUN_ID or TULA_JOB in
its environment; without them, a start costs two look-ups. The hook does nothing until torch is imported, then nothing
until an optimizer has stepped, and takes no step of a script that imports `tula_agent`: hence a module outside that
package. Where the script imports accelerate, it also notes that this lowers the batch after an out-of-memory, which no
step shows. It never raises.

Lightning's Trainers take their callback from an entry point, `lightning_callbacks`, in every process; the agent that it
imports keeps the hook aside.
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
"""The last out-of-memory after which accelerate lowered the script's batch; empty before the first."""


class WhenImported:
    """Hands each of some modules to a function right after Python has imported it; imports nothing itself."""

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
    """Have `Stepped` called after each step of the optimizers of torch's module."""
    optimizers.register_optimizer_step_post_hook(Stepped())


def see_out_of_memory(memory: Any) -> None:
    """Note the exceptions that accelerate's module takes for an out-of-memory: the script goes on with fewer examples.

    `find_executable_batch_size`, the Trainer's `auto_find_batch_size` too, catches the exception itself.
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
    """Called after each step of each optimizer. Only `SystemExit` leaves it, where a profiling run has enough."""

    def __init__(self) -> None:
        self._stepped: Any = None
        self._aside = False

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if self._aside:
            return
        try:
            if self._stepped is None:
                if "tula_agent" in sys.modules:  # the script measures itself
                    self._aside = True
                    return
                self._stepped = importlib.import_module("tula_agent.unedited").stepped
            self._stepped(optimizer)
        except Exception as error:
            self._aside = True
            print(f"tula: nothing more is measured, training continues: {error!r}", file=sys.stderr)


@functools.cache
def _lightning_callback() -> Any:
    """Return the class of the callback, None where the script imports the agent: it then measures itself."""
    if "tula_agent" in sys.modules:
        return None
    return importlib.import_module("tula_agent.callbacks.lightning").UneditedCallback


def lightning_callbacks() -> list[Any]:
    """Return the callback that measures a `fit`: Lightning asks for each Trainer. Empty where nobody launched a run."""
    try:
        callback = _lightning_callback() if _LAUNCHED else None
        return [callback()] if callback else []
    except Exception as error:
        print(f"tula: Lightning's Trainer is not measured, training continues: {error!r}", file=sys.stderr)
        return []


_FUNCTIONS = {"torch.optim.optimizer": see_steps, "accelerate.utils.memory": see_out_of_memory}
_LAUNCHED = bool(os.environ.get("TULA_RUN_ID") or os.environ.get("TULA_JOB"))
if _LAUNCHED:
    sys.meta_path.insert(0, WhenImported(_FUNCTIONS))
