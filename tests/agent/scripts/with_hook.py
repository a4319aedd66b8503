"""Runs a script that does not import the agent as the start-up hook would: it needs no second start of Python."""

import runpy
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from tula_client.launch.environment import startup_folder

hook = runpy.run_path(str(Path(startup_folder() or "", "sitecustomize.py")))
register_optimizer_step_post_hook(hook["_Stepped"]())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
