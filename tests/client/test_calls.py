"""Tests the pure functions that build requests and parse responses; no test opens a connection."""

from __future__ import annotations

import dataclasses
import inspect
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tula_client import NotFoundError, ProblemError, TulaError, UnexpectedAnswerError, _calls
from tula_client._calls import calls
from tula_client._errors import from_problem
from tula_client._request import Answer
from tula_wire import Configuration, JobPatch, JobSpec, Problem, ProblemType, RunCreate, routes

PROBLEM_TYPES = [value for name, value in vars(ProblemType).items() if name.isupper()]


def test_every_route_has_a_call() -> None:
    source = inspect.getsource(_calls)
    unused = {"METRICS"}  # no call: a page for Prometheus
    missing = {name for name in filter(str.isupper, vars(routes)) if f"routes.{name}" not in source} - unused
    assert not missing


@given(st.text(min_size=1).filter(lambda text: text not in (".", "..")))
def test_a_name_of_any_content_stays_one_segment_of_the_path(name: str) -> None:
    try:
        path = calls.job(name).request.path
    except UnicodeEncodeError:
        return
    assert path.startswith("/v1/jobs/")
    assert path.count("/") == 3
    assert "?" not in path
    assert "#" not in path


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_would_lead_to_another_route_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="job_id"):
        calls.job(name)


def test_a_patch_sends_only_what_was_set() -> None:
    body = calls.patch_job("j", JobPatch(objective="cost")).request.body
    assert json.loads(body or b"") == {"objective": "cost"}


def test_registering_is_repeatable_because_a_key_is_always_sent(spec: JobSpec) -> None:
    first, second = calls.register(spec).request, calls.register(spec).request
    assert first.idempotent
    assert first.headers["Idempotency-Key"] != second.headers["Idempotency-Key"]


def test_a_claim_is_not_repeatable_because_it_may_act_twice() -> None:
    from tula_wire import ClaimRequest

    assert not calls.claim("j", ClaimRequest(holder="me")).request.idempotent


def test_a_list_becomes_a_repeated_parameter() -> None:
    request = calls.predictions("j", num_nodes=[1, 2], global_batch_size=64).request
    assert request.query == (("num_nodes", "1"), ("num_nodes", "2"), ("global_batch_size", "64"))
    assert calls.predictions("j", np.array([1, 2]), 64).request == request


def test_only_what_differs_from_its_default_is_sent() -> None:
    assert calls.chart("j", quantity="time").request.query == ()
    assert calls.chart("j", "memory", quantity="cost").request.query == (("quantity", "cost"),)
    assert calls.samples("j", warmup=False, limit=None).request.query == (("warmup", "False"),)
    assert calls.jobs(archived=True).request.query == (("archived", "True"),)
    assert calls.job("j").request.body is None


@pytest.mark.parametrize("kind", PROBLEM_TYPES)
def test_every_problem_type_has_an_exception_of_its_own(kind: str) -> None:
    error = from_problem(Problem(type=kind, title="t", status=400, detail="d"))
    assert type(error) is not ProblemError
    assert error.type == kind


def test_a_problem_type_of_a_newer_service_is_still_a_problem() -> None:
    body = Problem(type="urn:tula:problem:new", title="t", status=418, detail="Do that.", field="a.b").model_dump()
    answer = Answer(418, {}, json.dumps(body | {"hint": "a field of a newer service"}).encode())
    with pytest.raises(ProblemError, match=r"a\.b: Do that\.") as caught:
        calls.job("j").parse(answer)
    assert caught.value.status == 418


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b"\xff"])
def test_an_answer_of_something_else_is_named_as_such(body: bytes) -> None:
    for status in (200, 404, 500):
        with pytest.raises(UnexpectedAnswerError, match="TULA_URL"):
            calls.job("j").parse(Answer(status, {}, body))


def test_a_gateway_without_a_service_behind_it_counts_as_unavailable() -> None:
    with pytest.raises(TulaError, match="502"):
        calls.jobs().parse(Answer(502, {}, b"<html>Bad Gateway</html>"))


def test_an_unchanged_policy_costs_no_body() -> None:
    call = calls.scaling("j", etag='"3"')
    assert call.request.headers["If-None-Match"] == '"3"'
    assert call.parse(Answer(304, {"etag": '"3"'}, b"")).thresholds is None


def test_a_field_of_a_newer_service_is_ignored() -> None:
    answer = Answer(200, {"etag": '"1"'}, b'{"version": 1, "policy": "ags", "newer": [1]}')
    thresholds = calls.scaling("j").parse(answer).thresholds
    assert thresholds is not None
    assert thresholds.policy == "ags"


def test_requests_are_values() -> None:
    request = calls.jobs(limit=2).request
    assert request == dataclasses.replace(request)
    assert request.query == (("limit", "2"),)


def test_a_configuration_is_checked_as_a_field() -> None:
    unchecked = Configuration(num_nodes=0, local_batch_size=32)
    with pytest.raises(ValidationError, match=r"configuration\.num_nodes"):
        RunCreate(kind="train", configuration=unchecked)
    valid = dataclasses.replace(unchecked, num_nodes=2)
    assert valid.as_json() == RunCreate(kind="train", configuration=valid).model_dump()["configuration"]


def test_a_user_may_derive_from_an_exception_of_a_problem() -> None:
    class Mine(NotFoundError):
        pass

    class Typed(ProblemError, type=ProblemType.NOT_FOUND):
        pass

    problem = Problem(type=ProblemType.NOT_FOUND, title="Not found", status=404, detail="none")
    assert (Mine.type, Mine.exit_code) == (NotFoundError.type, NotFoundError.exit_code)
    assert type(from_problem(problem)) is NotFoundError
    assert Typed(problem).type == ProblemType.NOT_FOUND
