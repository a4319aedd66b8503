"""Build hook: a real wheel carries the migrations inside `tula_service`; an editable install reads the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class MigrationsHook(BuildHookInterface[Any]):
    """Adds `migrations/` to standard wheels only, since an editable wheel would keep a stale copy."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["migrations"] = "tula_service/migrations"
