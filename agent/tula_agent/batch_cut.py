"""Cutting a batch to its first examples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.nn.utils.rnn import PackedSequence

from tula_agent.measure.step_timer import tensors_in


def first_examples(value: Any, size: int, count: int) -> Any:
    """The first `count` of the `size` examples in a batch: tensors and lists whose leading length is `size` are cut.

    Containers are copied, not changed. Raises TypeError where a part has another leading length, or may be either a
    list of examples or a list of tensors.
    """
    if isinstance(value, PackedSequence):
        raise TypeError("it holds a packed sequence")
    shape = getattr(value, "shape", None)
    if shape is not None:
        if len(shape) and shape[0] != size:
            raise TypeError(f"it holds a tensor of shape {tuple(shape)}, whose leading length is not {size}")
        return value[:count] if len(shape) else value
    if not tensors_in(value):
        return value[:count] if isinstance(value, (list, tuple)) and len(value) == size else value
    if isinstance(value, (list, tuple)):
        return _first_of_sequence(value, size, count)
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)
        for key, part in value.items():
            copied[key] = first_examples(part, size, count)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: first_examples(part, size, count) for name, part in parts.items()})
    raise TypeError(f"it is, or holds, a {type(value).__name__}")


def _first_of_sequence(value: Any, size: int, count: int) -> Any:
    """Of a list of examples, the first; of a list of tensors, each cut."""
    try:
        parts = [first_examples(part, size, count) for part in value]
    except TypeError:
        if len(value) != size:
            raise
        return value[:count]
    if len(value) == size:
        raise TypeError(f"a {type(value).__name__} of {size} tensors may be the examples or parts of all examples")
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
