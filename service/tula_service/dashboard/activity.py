"""Events of a job as sentences for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tula_service.dashboard.format import words
from tula_wire import Configuration, Event, EventKind
from tula_wire.format import configuration

KINDS: Final[tuple[EventKind, ...]] = ("job", "run", "recommendation", "scaling", "drift", "advice")
"""All but `samples`, of which there are thousands."""


@dataclass(frozen=True)
class Activity:
    """An event and its sentence; `warns` is set where a person may want to act."""

    event: Event
    sentence: str
    warns: bool


def activities(events: list[Event]) -> list[Activity]:
    """In the order given."""
    return [Activity(event, _sentence(event), _warns(event)) for event in events]


def _warns(event: Event) -> bool:
    bad = event.data.get("state") in ("failed", "out_of_memory") or event.data.get("kind") == "reconfigure"
    limits = event.kind == "advice" and event.data.get("kind") in ("deadline", "budget")
    return bad or limits or (event.kind == "drift" and event.data.get("alarm") != "recovered")


def _sentence(event: Event) -> str:
    data: dict[str, Any] = event.data
    if isinstance(data.get("sentence"), str):
        return str(data["sentence"])
    if event.kind == "recommendation":
        chosen = data.get("configuration")
        name = configuration(Configuration(**chosen)) if isinstance(chosen, dict) else "nothing"
        return f"Recommends {name} ({words(str(data.get('objective', '')))}, {data.get('basis', '')})."
    state = words(str(data.get("state", "changed")))
    noun = "Job" if event.kind == "job" else "Run" if event.kind == "run" else "Thresholds of gradient scaling"
    why = next((data[name] for name in ("message", "plan_reason", "purpose", "reason") if data.get(name)), "")
    return f"{noun} {state}{f': {why}' if why else ''}"
