"""Build hook: what a wheel holds beside the packages, and what an editable install reads from the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelHook(BuildHookInterface[Any]):
    """Adds the start-up hook of scripts (`tula.pth`), and to standard wheels files of which an editable one would keep
    a copy.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["migrations"] = "tula_service/migrations"
            build_data["force_include"]["agent/tula_startup.py"] = "tula_startup.py"
        build_data["force_include" if version == "standard" else "force_include_editable"]["agent/tula.pth"] = (
            "tula.pth"
        )
