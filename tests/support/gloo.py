"""How training scripts of the tests leave their process group, and speak while their ranks share a pipe."""

import json
import os
import time
from typing import Any

import torch.distributed as dist


def leave_group() -> None:
    """Destroy the group after a moment in which gloo's threads let go of the last reduction: see docs/limits.md."""
    time.sleep(0.05)
    dist.destroy_process_group()


def say(line: str) -> None:
    """Print a line in one piece: unbuffered, `print` writes words and line ends apart, and ranks fall into them."""
    os.write(1, f"{line}\n".encode())


def tell_all(mine: Any) -> None:
    """The first rank prints what every rank has found, in their order, as `RESULT` and JSON; then all leave."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    if dist.get_rank() == 0:
        say("RESULT " + json.dumps(gathered))
    dist.barrier()
    leave_group()
