"""What tools are given that look for the largest batch: a limit at which memory ends, or the digits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def answer(on_limit: Callable[[int, int], tuple[int, int]], on_digits: Callable[[int, int], tuple[int, int]]) -> None:
    """Work through the job that the command line names; each function answers (batch, trials) for (least, largest)."""
    job = json.loads(Path(sys.argv[1]).read_text())
    began = time.monotonic()
    find = on_limit if job["cases"] else on_digits
    found = [find(*case) for case in job["cases"] or [job["digits"]]]
    Path(sys.argv[2]).write_text(json.dumps({"found": found, "seconds": time.monotonic() - began}))
