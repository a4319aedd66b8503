"""Runs the benchmarks one after another and stores their JSON files in benchmarks/results (`make bench`).

    python -m benchmarks [--smoke] [--out FOLDER] [NAME...]

`--smoke` runs each benchmark for a few seconds, to check that it works; the figures are meaningless and are not stored.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of all benchmarks, which are the public modules of this package."""
    return sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks named on the command line, or all benchmarks; return the number of benchmarks that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a benchmark to run (default: all)")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder for the JSON files")
    parser.add_argument("--smoke", action="store_true", help="run each benchmark for a few seconds and store nothing")
    options = parser.parse_args(arguments)
    today = datetime.date.today().isoformat()
    failed = []
    with tempfile.TemporaryDirectory() as discarded:
        folder = Path(discarded) if options.smoke else options.out
        for name in options.names or names():
            words = ["--json", str(folder / f"{today}-{name}.json")]
            words += ["--smoke"] if options.smoke else []
            print(f"== {name}", flush=True)
            if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *words], check=False).returncode:
                failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
