"""Starts Python scripts as processes within milliseconds: a parent that has imported torch forks them.

Reads one JSON object a line: argv, and for each process to start its env, stdout, stderr (files). Answers the process
ids, in one line, and their wait statuses, in another, once all have ended. Modules named on the command line are
imported before, for scripts that would all import them.
Each child ends as an interpreter started afresh would: `atexit`, exit status and signals are the script's own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import httpx  # noqa: F401
    import torch
    import torch._dynamo  # what an optimizer imports when it is made
    import torch.distributed
    import torch.distributed.checkpoint.state_dict_saver  # what a sharded checkpoint and a sharded model take
    import torch.distributed.fsdp
    import torch.utils.data

    import tula_wire  # noqa: F401  # models take longer to build than a training of the tests to run

    for name in sys.argv[1:]:
        importlib.import_module(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what a child never touches it never copies
    for line in sys.stdin:
        order = json.loads(line)
        children = []
        for wanted in order["processes"]:
            child = os.fork()
            if child == 0:
                become(order["argv"], wanted)
                return
            children.append(child)
        print(json.dumps(children), flush=True)
        print(json.dumps([os.waitpid(child, 0)[1] for child in children]), flush=True)


def become(argv: list[str], wanted: dict[str, Any]) -> None:
    """Turn this fork into `python argv`, with a clean environment and its own files."""
    os.environ.clear()
    os.environ.update(wanted["env"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(wanted[name], flags), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = argv
    sys.path[:0] = [str(Path(argv[0]).parent), *filter(None, wanted["env"].get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
