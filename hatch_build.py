"""Build hook that adds files to wheels; an editable install reads most of these files from the checkout instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vl_convert
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_CHARTS = "service/tula_service/dashboard/static/vega.js"


class WheelHook(BuildHookInterface[Any]):
    """Adds files to wheels, and writes the script that draws charts in a browser.

    All wheels receive the start-up hook for scripts (`tula.pth`). Standard wheels also receive the files that an
    editable install reads from the checkout.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        Path(self.root, _CHARTS).write_text(_chart_script())
        build_data["artifacts"].append(_CHARTS)  # since git ignores this file
        if version == "standard":
            build_data["force_include"]["migrations"] = "tula_service/migrations"
            build_data["force_include"]["agent/tula_startup.py"] = "tula_startup.py"
        build_data["force_include" if version == "standard" else "force_include_editable"]["agent/tula.pth"] = (
            "tula.pth"
        )


def _chart_script() -> str:
    """Return Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script of about 0.9 MB."""
    bundle = vl_convert.javascript_bundle(snippet="window.vegaEmbed = vegaEmbed;")
    # Without the function, the bundle's top-level names (such as `$`) would become globals of the page.
    return f"(() => {{\n{bundle}\n}})();\n"
