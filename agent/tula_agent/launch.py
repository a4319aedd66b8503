"""Tracks the local batch sizes that one launch measures in turn: which batch is due, and which run gets its samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from tula_agent.batches import first_examples


class Launch:
    """The local batches of one launch, the smallest first, and the run of each; the script's whole batch comes last.

    The loader yields whole batches and the script gets the first examples of each, so one start measures all batch
    sizes.

    whole: the local batch that the script was started with. smaller: the other batches with their runs, ascending.
    own_run_id: the run of the whole batch. cut_to: the batch that is due (None: the whole batch); an attribute, since
    the loop reads it every time. first_step: the step at which the measurement of that batch began. measured:
    batches that were measured, with their runs; the shipping thread takes them.
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
        """Return the run that is being measured."""
        return self._due[0][1] if self._due else self.own_run_id

    def use(self, smaller: Sequence[tuple[int, str]]) -> None:
        """Measure these batches, then the whole batch; batches that were measured already keep their runs."""
        self._due = list(smaller) if self.whole is not None else []
        self._runs.update(self._due)
        self.cut_to = self._due[0][0] if self._due else None

    def differs(self, smaller: Sequence[tuple[int, str]]) -> bool:
        """Return True if nothing is measured yet and a batch other than the first of `smaller` is due."""
        return self.first_step == 0 and (smaller[0][0] if smaller else None) != self.cut_to

    def cut(self, batch: Any, size: int | None, first: bool) -> Any:
        """Return the first `cut_to` of the `size` examples in `batch`, which are measured now.

        first: no step has ended yet. Raises TypeError for a batch that can't be cut.
        """
        if self.cut_to is None or self.whole is None:
            return batch
        if size is None or size > self.whole or (first and size != self.whole):
            raise TypeError(f"it has {size} examples, not the local batch of {self.whole}")
        return batch if size <= self.cut_to else first_examples(batch, size, self.cut_to)

    def end_batch(self, step: int) -> None:
        """End the batch that was due after `step`, its last step, and turn to the next batch."""
        if self.cut_to is not None:
            self.measured.append((self.cut_to, self.run_id))
        self.use(self._due[1:])
        self.first_step = step + 1

    def find_run(self, local_batch_size: int | None) -> str:
        """Return the run that samples of this batch belong to."""
        return self._runs.get(local_batch_size or 0, self.own_run_id)

    def batch_share(self, local_batch_size: int | None) -> float:
        """Return the present batch as a share of the whole batch; 1 if batches are not cut."""
        if self.whole is None or local_batch_size not in self._runs:
            return 1.0
        return local_batch_size / self.whole
