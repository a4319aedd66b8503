"""Draws specifications as PNG or SVG, and builds the JavaScript that draws them in a browser; both with vl-convert.

vl-convert holds the GIL for one to several seconds: in this process it would block every request, and a supervisor
would restart the worker. It therefore runs in a separate process; callers limit how many at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tula_service.dashboard.charts.vega import Spec
from tula_service.errors import Busy

LONGEST_S: Final = 60.0
_SCRIPT: Final = Path(__file__).with_name("_draw.py")
_SNIPPET: Final = "window.vegaEmbed = vegaEmbed;"


def png(spec: Spec, *, scale: float = 2.0) -> bytes:
    """The chart as a PNG, `scale` pixels to the point. Raises Busy when that takes too long."""
    return _drawn({"kind": "png", "spec": _opaque(spec), "scale": scale})


def svg(spec: Spec) -> str:
    """The chart as an SVG document. Raises Busy when that takes too long."""
    return _drawn({"kind": "svg", "spec": _opaque(spec)}).decode()


def javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script, about 0.9 MB."""
    bundle = _drawn({"kind": "javascript", "snippet": _SNIPPET}).decode()
    # Its top-level names (`$` among them) would otherwise become globals of the page.
    return f"(() => {{\n{bundle}\n}})();\n"


def _drawn(asked: dict[str, Any]) -> bytes:
    try:
        # -I: neither the environment nor the working directory decides what is imported.
        done = subprocess.run(
            [sys.executable, "-I", str(_SCRIPT)],
            input=json.dumps(asked, allow_nan=False).encode(),
            capture_output=True,
            check=True,
            timeout=LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        text = "Drawing this chart takes too long: ask for it as JSON, or again later."
        raise Busy(text, retry_after_s=5.0) from None
    return done.stdout


def _opaque(spec: Spec) -> Spec:
    """With a white background, because a file has no page behind it."""
    return {**spec, "background": "white", "padding": 12}
