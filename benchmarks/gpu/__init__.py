"""Contains all measurements that need a GPU; one command makes them in a few minutes (see `__main__`)."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build" / "gpu-packages"
"""Folder with the packages that `--packages` packed for a machine without a package index; it is searched last."""

# Tula is not installed on the machine; processes that the parts start inherit the environment.
_SOURCES = [str(ROOT / name) for name in ("agent", "client", "service", ".")]
sys.path[:0] = [path for path in _SOURCES if path not in sys.path]
sys.path += [str(PACKAGES)]
os.environ["PYTHONPATH"] = os.pathsep.join([*_SOURCES, os.environ.get("PYTHONPATH", ""), str(PACKAGES)])
