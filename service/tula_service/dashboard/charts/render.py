"""Draws specifications as PNG or SVG, and builds the JavaScript that draws them in a browser; both with vl-convert.

vl-convert holds the GIL for one to several seconds: in this process it would block every request, and a supervisor
would restart the worker. It therefore runs in a separate process, which executes this file as a script and imports
nothing else of ours, so that starting it costs little; callers limit how many at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

LONGEST_S: Final = 60.0
NICER: Final = 19
"""Lowest priority: else images that one sender asks for slow down all other answers where cores are few."""


def png(spec: dict[str, Any], *, scale: float = 2.0) -> bytes:
    """The chart as a PNG, `scale` pixels to the point. Raises Busy when that takes too long."""
    return _made("vegalite_to_png", vl_spec=_opaque(spec), scale=scale, allowed_base_urls=[])


def svg(spec: dict[str, Any]) -> str:
    """The chart as an SVG document. Raises Busy when that takes too long."""
    return _made("vegalite_to_svg", vl_spec=_opaque(spec), allowed_base_urls=[]).decode()


def javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script, about 0.9 MB."""
    bundle = _made("javascript_bundle", snippet="window.vegaEmbed = vegaEmbed;").decode()
    # Its top-level names (`$` among them) would otherwise become globals of the page.
    return f"(() => {{\n{bundle}\n}})();\n"


def _opaque(spec: dict[str, Any]) -> dict[str, Any]:
    """With a white background, because a file has no page behind it."""
    return {**spec, "background": "white", "padding": 12}


def _made(function: str, **arguments: Any) -> bytes:
    """What a function of vl-convert returns, called in another process."""
    try:
        # -I: neither the environment nor the working directory decides what is imported.
        done = subprocess.run(
            [sys.executable, "-I", __file__],
            input=json.dumps([function, arguments], allow_nan=False).encode(),
            capture_output=True,
            check=True,
            timeout=LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        from tula_service.errors import Busy  # not at the head, so that the script does without

        text = "Drawing this chart takes too long: ask for it as JSON, or again later."
        raise Busy(text, retry_after_s=5.0) from None
    return done.stdout


def _main() -> None:
    os.nice(NICER)  # what the service answers goes first
    import vl_convert  # which takes a while by itself

    function, arguments = json.load(sys.stdin)
    made = getattr(vl_convert, function)(**arguments)
    sys.stdout.buffer.write(made if isinstance(made, bytes) else made.encode())


if __name__ == "__main__":
    _main()
