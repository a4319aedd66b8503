"""Does what the start-up hook would do for a script that never calls the agent, without starting Python again."""

import runpy
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

import tula_startup

register_optimizer_step_post_hook(tula_startup.Stepped())
if (memory := sys.modules.get("accelerate.utils.memory")) is not None:
    tula_startup.see_out_of_memory(memory)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
