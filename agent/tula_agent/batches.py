"""Counts the examples, tokens and bytes in a batch, and extracts its first examples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn.utils.rnn import PackedSequence


def infer_batch_size(batch: Any) -> int | None:
    """Return the number of examples in `batch`, inferred from the batch itself; None if this is not possible.

    The count is the number of graphs in a graph batch, the length of a list of samples or of the first list in a tuple
    of lists, or the first dimension of the first two tensors if it is the same in both.
    """
    first = batch[0] if type(batch) in (list, tuple) and batch else batch  # the usual case, without a search
    shape = getattr(first, "shape", None)
    if shape and (first is batch or len(batch) == 1 or _leading(batch[1]) in (None, shape[0])):
        return int(shape[0])
    if shape and first is not batch:
        return None
    for name in ("num_graphs", "batch_size"):  # attributes in torch_geometric and DGL
        if type(count := getattr(batch, name, None)) is int and count > 0:
            return int(count)
    if first is not batch and isinstance(first, (Mapping, list, tuple)) and tensors_in(batch):
        by_column = type(batch) is tuple and isinstance(first, (list, tuple))
        return len(first) if by_column else len(batch)
    lengths = [int(tensor.shape[0]) for tensor in tensors_in(batch) if len(tensor.shape)][:2]
    return lengths[0] if lengths and lengths[0] == lengths[-1] else None


def _leading(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    return int(shape[0]) if shape else None


class BatchSizes:
    """Counts the examples in batches. A stated size takes precedence, since the shape of a batch can be misleading.

    The stated size is `given` by the script (a number or a function of the batch), or it is the `batch_size` of the
    loader or of its batch sampler. A full batch shows where its size appears (in the first or second dimension of a
    tensor, or as the length of a list); the size of a smaller batch, such as the last batch of an epoch, is read from
    the same place.
    """

    def __init__(self, given: float | Callable[[Any], float] | None = None) -> None:
        self.given = given
        self._places: dict[int, tuple[str, int]] = {}  # by stated size
        self._leads: int | None = None  # the stated size that equals the first tensor's first dimension

    def of(self, batch: Any, loader: Any = None) -> int | None:
        """Return the number of examples in `batch` (or what `given` counts, such as tokens); None if it is unknown."""
        given = self.given
        if given is not None and not isinstance(given, (int, float)):
            return max(1, round(given(batch)))
        stated = round(given) if given is not None else stated_batch_size(loader)
        first = batch[0] if type(batch) in (list, tuple) and batch else batch
        shape = getattr(first, "shape", None)
        if stated is None:
            return infer_batch_size(batch)
        if shape and shape[0] == stated:
            self._leads = stated
            return stated
        lengths = _lengths(batch)
        place = ("dimension 0", 0) if self._leads == stated else self._places.get(stated)
        if place is None:
            place = next((place for place, length in lengths.items() if length == stated), None)
            if place is not None:
                self._places[stated] = place
        length = lengths.get(place) if place is not None else infer_batch_size(batch)
        return length if length is not None and 0 < length < stated else stated


def stated_batch_size(loader: Any) -> int | None:
    """Return the `batch_size` of a loader or else of its batch sampler; None if neither has one."""
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        if type(size := getattr(holder, "batch_size", None)) is int and size > 0:
            return int(size)
    return None


def _lengths(batch: Any) -> dict[tuple[str, int], int]:
    """Return every length in the batch that may be the batch size, keyed by its place; the likeliest comes first."""
    lengths = {}
    if isinstance(batch, (list, tuple)):
        lengths["outer", 0] = len(batch)
        lengths |= {("inner", i): len(part) for i, part in enumerate(batch[:8]) if isinstance(part, (list, tuple))}
    shapes = [tensor.shape for tensor in tensors_in(batch)[:8]]
    for dimension in (0, 1):
        for i, shape in enumerate(shapes):
            if len(shape) > dimension:
                lengths[f"dimension {dimension}", i] = int(shape[dimension])
    return lengths


def infer_sequence_length(batch: Any) -> int | None:
    """Return the number of tokens per example, including padding; None if the batch contains no tokens.

    The result is the length of `input_ids`, or that of the inputs if inputs and targets have the same shape (next-token
    prediction).
    """
    if isinstance(batch, Mapping):
        inputs: list[Any] = [batch.get("input_ids")]
    else:
        inputs = list(batch) if isinstance(batch, (list, tuple)) and len(batch) == 2 else [None]
    if not all(hasattr(part, "element_size") and not part.dtype.is_floating_point for part in inputs):
        return None
    shapes = {tuple(part.shape) for part in inputs}
    shape = shapes.pop()
    return int(shape[1]) if len(shape) == 2 and not shapes else None


def batch_bytes(batch: Any) -> int:
    """Return the total size of the tensors in `batch`, in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))


def tensors_in(value: Any, depth: int = 4) -> list[Any]:
    """Return the tensors inside nested mappings, sequences and dataclasses in order, at most `depth` levels deep."""
    if hasattr(value, "element_size") and hasattr(value, "shape"):
        return [value]
    if depth == 0 or isinstance(value, (str, bytes)):
        return []
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value[:64])
    elif hasattr(value, "__dict__"):
        parts = list(vars(value).values())
    else:
        return []
    return [tensor for part in parts for tensor in tensors_in(part, depth - 1)]


def map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to every tensor in nested tuples, lists and mappings."""
    if hasattr(value, "element_size"):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(part, function) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, function) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(part, function) for part in value)
    return value


def first_examples(value: Any, size: int, count: int) -> Any:
    """Return the first `count` of the `size` examples in a batch.

    Tensors whose first dimension is `size` and lists of length `size` are cut. Containers are copied, not changed.
    Raises TypeError if a part has a different length, or if it could be either a list of examples or a list of tensors.
    """
    if isinstance(value, PackedSequence):
        raise TypeError("a packed sequence cannot be cut")
    shape = getattr(value, "shape", None)
    if shape is not None:
        if len(shape) and shape[0] != size:
            raise TypeError(f"the first dimension of a tensor of shape {tuple(shape)} is not {size}")
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
    raise TypeError(f"an object of type {type(value).__name__} cannot be cut")


def _first_of_sequence(value: Any, size: int, count: int) -> Any:
    """Return the first examples of a list of examples, or of each tensor in a list of tensors."""
    try:
        parts = [first_examples(part, size, count) for part in value]
    except TypeError:
        if len(value) != size:
            raise
        return value[:count]
    if len(value) == size:
        raise TypeError(f"it is unclear which part of a {type(value).__name__} of {size} tensors is one example")
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
