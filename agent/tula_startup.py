"""Start-up hook of a launched script: measures one that does not import the agent, under any launcher.

`tula.pth`, beside the installed packages, has Python import this module when it starts with TULA_RUN_ID or TULA_JOB in
its environment; without them, a start costs two look-ups. The hook does nothing until torch is imported, then nothing
until an optimizer has stepped, and nothing at all in a script that imports `tula_agent`: hence a module outside that
package. It never raises.
"""

import contextlib
import importlib
import importlib.machinery
import sys
from typing import Any

_OPTIMIZER = "torch.optim.optimizer"


class WhenTorchLoads:
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
                module.register_optimizer_step_post_hook(Stepped())

        with contextlib.suppress(Exception):
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


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


sys.meta_path.insert(0, WhenTorchLoads())
