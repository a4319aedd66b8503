"""The model service: takes measurements, fits models of step time and memory, recommends configurations."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("tula")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
