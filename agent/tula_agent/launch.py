"""Tracks the local batch size that a launch is measuring, and the run that receives the samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from tula_agent.batches import first_examples


class Launch:
    """Local batch sizes of one launch in ascending order, each with its run; the script's whole batch comes last.

    The loader yields whole batches, and the script receives only the first examples of each batch, so that one start of
    the script suffices for all batch sizes.

    whole: the local batch size with which the script was started. smaller: the other batch sizes in ascending order,
    each with its run. own_run_id: the run of the whole batch. cut_to: the batch size that is being measured (None: the
    whole batch); it is an attribute for speed, since the loop reads it at every batch. first_step: the step at which
    this measurement began. measured: the batch sizes that have been measured, each with its run; the shipping thread
    removes them.
    """

    def __init__(self, run_id: str, whole: int | None, smaller: Sequence[tuple[int, str]] = ()) -> None:
        self.whole = whole
        self.own_run_id = run_id
        self.first_step = 0
        self.measured: deque[tuple[int, str]] = deque()
        self._runs: dict[int, str] = {}
        self.use(smaller)

    @property
    def several(self) -> bool:
        """Return True if the launch has more than one run."""
        return bool(self._runs)

    @property
    def run_id(self) -> str:
        """Return the id of the run that is being measured."""
        return self._due[0][1] if self._due else self.own_run_id

    def use(self, smaller: Sequence[tuple[int, str]]) -> None:
        """Measure the batch sizes in `smaller`, then the whole batch; sizes that have been measured keep their runs."""
        self._due = list(smaller) if self.whole is not None else []
        self._runs.update(self._due)
        self.cut_to = self._due[0][0] if self._due else None

    def differs(self, smaller: Sequence[tuple[int, str]]) -> bool:
        """Return True if nothing has been measured yet and the current batch size is not the first in `smaller`."""
        return self.first_step == 0 and (smaller[0][0] if smaller else None) != self.cut_to

    def cut(self, batch: Any, size: int | None, first: bool) -> Any:
        """Return the first `cut_to` of the `size` examples in `batch`.

        first: True if no step has ended yet. Raises TypeError if the batch can't be cut.
        """
        if self.cut_to is None or self.whole is None:
            return batch
        if size is None or size > self.whole or (first and size != self.whole):
            raise TypeError(f"the batch has {size} examples, but the local batch size is {self.whole}")
        return batch if size <= self.cut_to else first_examples(batch, size, self.cut_to)

    def end_batch(self, step: int) -> None:
        """End the measurement of the current batch size, whose last step is `step`, and begin with the next size."""
        if self.cut_to is not None:
            self.measured.append((self.cut_to, self.run_id))
        self.use(self._due[1:])
        self.first_step = step + 1

    def find_run(self, local_batch_size: int | None) -> str:
        """Return the id of the run to which samples at this local batch size belong."""
        return self._runs.get(local_batch_size or 0, self.own_run_id)

    def batch_share(self, local_batch_size: int | None) -> float:
        """Return `local_batch_size` as a fraction of the whole batch; 1 if batches of this size are not cut."""
        if self.whole is None or local_batch_size not in self._runs:
            return 1.0
        return local_batch_size / self.whole
