"""Tests that readers accept what a newer writer adds: fields and words that they do not know."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tula_wire import ClaimRequest, RunPatch, read

PATCH = {"state": "paused_by_a_newer_service", "message": "m", "added_later": 1}


def test_a_reader_takes_a_word_and_a_field_of_a_newer_writer() -> None:
    assert read(RunPatch, PATCH).state == "paused_by_a_newer_service"
    assert read(RunPatch, b'{"state": "paused_by_a_newer_service"}').model_dump_json(exclude_none=True)


@pytest.mark.parametrize("wrong", [PATCH, {"state": "paused"}, {"state": "running", "added_later": 1}])
def test_the_service_takes_neither(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RunPatch.model_validate(wrong)


def test_a_reader_still_refuses_what_is_no_word_at_all() -> None:
    with pytest.raises(ValidationError):
        read(RunPatch, {"state": 5})
    with pytest.raises(ValidationError):
        read(ClaimRequest, {"holder": ""})
