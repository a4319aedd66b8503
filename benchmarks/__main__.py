"""Runs every benchmark in turn and keeps its JSON under benchmarks/results: `make bench`."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DATA = HERE.parent / "tests" / "data"

ARGUMENTS: dict[str, list[str]] = {
    "black_box": ["--grids", str(DATA / "grids" / "step_time.csv")],
    "cold_start": ["--steps", str(DATA / "single_device.csv")],
    "memory": ["--grids", str(DATA / "grids" / "memory.csv")],
    "neighbours": ["--grids", str(DATA / "grids" / "step_time.csv")],
    "step_time": ["--grids", str(DATA / "grids" / "step_time.csv")],
}


def names() -> list[str]:
    """Benchmarks by module name: every public module of this package."""
    return sorted(path.stem for path in HERE.glob("[a-z]*.py"))


def main() -> int:
    """Run the benchmarks named on the command line, or all; answers the number that failed."""
    today = datetime.date.today().isoformat()
    failed = []
    for name in sys.argv[1:] or names():
        out = HERE / "results" / f"{today}-{name}.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", *ARGUMENTS.get(name, []), "--json", str(out)]
        print(f"== {name}", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
