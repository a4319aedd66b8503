"""Tests that the reader of server-sent events returns each event once, in order, and resumes where it stopped."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_client import Client, TulaError
from tula_client._calls import EventReader
from tula_wire import Event


def event(number: int, kind: str = "run") -> str:
    data = {"id": number, "kind": kind, "job_id": "j", "at": "2026-01-01T00:00:00Z", "data": {"n": number}}
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"


def feed(reader: EventReader, text: str) -> list[int]:
    found = (reader.feed(line) for line in text.split("\n"))
    return [one.id for one in found if one is not None]


@given(st.lists(st.integers(0, 50), max_size=30))
def test_each_event_comes_once_and_in_order(numbers: list[int]) -> None:
    ids = feed(EventReader(), "".join(event(number) for number in numbers))
    assert ids == sorted(set(ids))
    assert not numbers or ids[-1] == max(numbers)


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    assert feed(EventReader(), text) == []


def test_comments_and_foreign_fields_are_passed_over_and_a_kind_of_a_newer_service_comes_through() -> None:
    reader = EventReader()
    assert feed(reader, ": still here\n\n" + event(1, "of-a-newer-service") + "colour: red\n" + event(2)) == [1, 2]
    assert reader.last_id == 2


def test_an_event_cut_off_in_the_middle_is_asked_for_again() -> None:
    reader = EventReader()
    assert feed(reader, event(1) + event(2)[:30]) == [1]
    reader.disconnected()
    assert reader.last_id == 1
    assert feed(reader, event(2)) == [2]


def test_waits_between_connections_grow_and_follow_the_server() -> None:
    reader = EventReader()
    feed(reader, "retry: 100\n\n")
    waits = [reader.disconnected() for _ in range(12)]
    assert waits[:3] == [0.1, 0.2, 0.4]
    assert waits == sorted(waits)
    assert max(waits) <= 30.0
    feed(reader, event(1))
    assert reader.disconnected() == 0.1


class Unsteady(httpx.BaseTransport):
    """A server that sends two events per connection and then breaks off; it records where each reader resumes."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        after = request.headers.get("last-event-id")
        self.asked.append(after)
        start = int(after or 0) + 1
        if len(self.asked) == 2:
            raise httpx.ConnectError("connection refused")
        body = "retry: 0\n\n" + event(start) + event(start + 1) + event(start + 2)[:20]
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=body)


def test_the_client_reconnects_and_resumes_after_the_last_event() -> None:
    transport = Unsteady()
    with Client(transport=transport) as client:
        stream = client.events("j")
        assert [next(stream).id for _ in range(5)] == [1, 2, 3, 4, 5]
    assert transport.asked == [None, "2", "2", "4"]


def test_a_refusal_ends_the_stream() -> None:
    problem = {"type": "urn:tula:problem:not-found", "title": "t", "status": 404, "detail": "No such job."}
    answer = httpx.MockTransport(lambda _request: httpx.Response(404, json=problem))
    with Client(transport=answer) as client, pytest.raises(TulaError, match="No such job"):
        next(client.events("j"))


def test_events_are_the_models_of_the_wire() -> None:
    reader = EventReader()
    found = [one for line in event(7).split("\n") if (one := reader.feed(line)) is not None]
    assert isinstance(found[0], Event)
    assert found[0].data == {"n": 7}
