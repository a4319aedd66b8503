"""What kind of run this is, for an agent whose environment did not say: asked of the service once."""

from __future__ import annotations

from collections.abc import Callable

from tula_agent.config import ProfilePlan
from tula_agent.ship.transport import Transport

__all__ = ["InstructionPoller"]


class InstructionPoller:
    """Asks for the run at `path` until it is answered; of a profiling run, the plan goes to `offer`."""

    def __init__(self, path: str, offer: Callable[[ProfilePlan], None]) -> None:
        self._path = path
        self._offer = offer
        self._answered = False

    def poll(self, transport: Transport) -> None:
        """One question, if there was no answer yet. Raises KeyError or ValueError when the answer makes no sense."""
        if self._answered:
            return
        reply = transport.get(self._path)
        if reply.verdict == "retry":
            return
        self._answered = True
        told = (reply.body or {}).get("instruction")
        if reply.body and reply.body.get("kind") == "profile" and isinstance(told, dict):
            warmup, measure = int(told["profiling_warmup_steps"]), int(told["measuring_steps"])
            self._offer(ProfilePlan(warmup, measure, float(told["precision"])))
