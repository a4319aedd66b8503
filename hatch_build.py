"""Build hook: what a wheel holds beside the packages, and what an editable install reads from the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vl_convert
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_CHARTS = "service/tula_service/dashboard/static/vega.js"


class WheelHook(BuildHookInterface[Any]):
    """Adds the start-up hook of scripts (`tula.pth`), and to standard wheels files of which an editable one would keep
    a copy. Makes the script that draws charts in a browser.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        Path(self.root, _CHARTS).write_text(_chart_script())
        build_data["artifacts"].append(_CHARTS)  # which git ignores
        if version == "standard":
            build_data["force_include"]["migrations"] = "tula_service/migrations"
            build_data["force_include"]["agent/tula_startup.py"] = "tula_startup.py"
        build_data["force_include" if version == "standard" else "force_include_editable"]["agent/tula.pth"] = (
            "tula.pth"
        )


def _chart_script() -> str:
    """Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script, about 0.9 MB."""
    bundle = vl_convert.javascript_bundle(snippet="window.vegaEmbed = vegaEmbed;")
    # Its top-level names (`$` among them) would otherwise become globals of the page.
    return f"(() => {{\n{bundle}\n}})();\n"
