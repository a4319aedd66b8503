"""Implements the service, which stores measurements, fits models of time and memory, and recommends configurations."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("tula")
except PackageNotFoundError:  # the source tree is not installed
    __version__ = "0+unknown"
