"""Prints the callbacks of two Trainers to which the script gives none, and whether they are of the package's class.

Arguments: the package, and `--measures-itself` to import the agent first.
"""

import sys
from importlib import import_module

pl = import_module(sys.argv[1])
if "--measures-itself" in sys.argv:
    import tula_agent  # noqa: F401

for _ in range(2):
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = pl.Trainer(accelerator="cpu", devices=1, **options).callbacks
    print("callbacks", *(f"{type(callback).__name__} {isinstance(callback, pl.Callback)}" for callback in callbacks))
