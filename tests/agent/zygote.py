"""Starts Python scripts as processes of their own within milliseconds: a parent that has imported torch forks them.

Reads one JSON object a line: argv, env, stdout, stderr (files). Answers the child's process id, then its exit status.
Each child ends as an interpreter started afresh would: `atexit`, exit status and signals are the script's own.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys


def main() -> None:
    import httpx  # noqa: F401
    import torch
    import torch._dynamo  # what an optimizer imports when it is made
    import torch.distributed
    import torch.utils.data

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what a child never touches it never copies
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            become(order)
            return
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


def become(order: dict[str, object]) -> None:
    """Turn this fork into `python argv`, with a clean environment and its own files."""
    os.environ.clear()
    os.environ.update(order["env"])  # type: ignore[call-overload]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(str(order[name]), flags), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = list(order["argv"])  # type: ignore[call-overload]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
