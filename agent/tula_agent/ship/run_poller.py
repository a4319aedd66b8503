"""Asks the service once what kind of run this is, for an agent whose environment does not say."""

from __future__ import annotations

from collections.abc import Callable

from tula_agent.config import ProfilePlan
from tula_agent.ship.transport import Transport


class RunPoller:
    """Reads the run at `path` until the service answers; the plan of a profiling run goes to `on_plan`."""

    def __init__(self, path: str, on_plan: Callable[[ProfilePlan], None]) -> None:
        self._path = path
        self._on_plan = on_plan
        self._answered = False

    def poll(self, transport: Transport) -> None:
        """One request, unless it was answered before. Raises KeyError or ValueError for a malformed answer."""
        if self._answered:
            return
        reply = transport.get(self._path)
        if reply.verdict == "retry":
            return
        self._answered = True
        instruction = (reply.body or {}).get("instruction")
        if reply.body and reply.body.get("kind") == "profile" and isinstance(instruction, dict):
            warmup, measure = int(instruction["profiling_warmup_steps"]), int(instruction["measuring_steps"])
            self._on_plan(ProfilePlan(warmup, measure, float(instruction["precision"])))
