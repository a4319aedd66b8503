"""The service's enums have the values of the wire's Literals, in the same order."""

from __future__ import annotations

from enum import Enum
from typing import Any, get_args

import pytest

from tula_service import domain
from tula_wire import jobs, recommendations, runs


@pytest.mark.parametrize(
    ("enum", "literal"),
    [
        (domain.Objective, jobs.Objective),
        (domain.Search, jobs.Search),
        (domain.StepTimeForm, jobs.StepTimeModel),
        (domain.Basis, recommendations.Basis),
        (domain.RunKind, runs.RunKind),
        (domain.RunState, runs.RunState),
        (domain.RunOrigin, runs.RunOrigin),
        (domain.EndCause, runs.EndCause),
    ],
)
def test_an_enum_of_the_service_has_the_values_of_the_wire(enum: type[Enum], literal: Any) -> None:
    assert tuple(one.value for one in enum) == get_args(literal)
