"""Start-up hook of a launched script: measures one that does not import the agent.

`tula` puts this folder on the PYTHONPATH of a run's command, and Python imports the file when it starts. It does
nothing until torch is imported, then nothing until an optimizer has stepped, and nothing at all in a script that
imports `tula_agent`. It never raises.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_OPTIMIZER = "torch.optim.optimizer"
_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib takes milliseconds of every start)


def _load_hidden() -> None:
    """Run the sitecustomize that this file hides, if there is one; it may raise, as it may without this file."""
    paths = [path for path in sys.path if os.path.abspath(path or ".") != _FOLDER]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _WhenTorchLoads:
    """Registers the hook right after torch has defined its optimizers; imports nothing itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != _OPTIMIZER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            with contextlib.suppress(Exception):
                sys.meta_path.remove(self)
                module.register_optimizer_step_post_hook(_Stepped())

        with contextlib.suppress(Exception):
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Stepped:
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


if os.environ.get("TULA_RUN_ID"):
    sys.meta_path.insert(0, _WhenTorchLoads())
_load_hidden()
