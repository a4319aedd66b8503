"""Finds the system's Chromium, and defines the options that start it without a display."""

from __future__ import annotations

import shutil

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium_path() -> str | None:
    """Return the path of the first Chromium on the PATH, or None if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)
