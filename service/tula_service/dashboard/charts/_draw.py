"""Run as a script by `render`: reads a request as JSON from standard input, writes a drawing to standard output.

It imports nothing of ours, so that starting it costs little.
"""

from __future__ import annotations

import json
import os
import sys

NICER = 19
"""Lowest priority: else images that one sender asks for slow down all other answers where cores are few."""


def main() -> None:
    """Draw one chart, or write the JavaScript bundle; what the service answers goes first."""
    os.nice(NICER)
    import vl_convert  # which takes a while by itself

    asked = json.load(sys.stdin)
    if asked["kind"] == "javascript":
        made = vl_convert.javascript_bundle(asked["snippet"]).encode()
    elif asked["kind"] == "png":
        made = vl_convert.vegalite_to_png(asked["spec"], scale=asked["scale"], allowed_base_urls=[])
    else:
        made = vl_convert.vegalite_to_svg(asked["spec"], allowed_base_urls=[]).encode()
    sys.stdout.buffer.write(made)


if __name__ == "__main__":
    main()
