"""One launch that measures several local batches: which of them is due, and whose run it is."""

from __future__ import annotations

from collections.abc import Sequence


class LaunchBatches:
    """The local batches of one launch, the smallest first, and the run of each; the script's whole batch comes last.

    whole: the local batch that the script was started with. smaller: the other batches with their runs, ascending.
    """

    def __init__(self, run_id: str, whole: int | None, smaller: Sequence[tuple[int, str]] = ()) -> None:
        self.whole = whole
        self._run_id = run_id
        self._runs: dict[int, str] = {}
        self._due: list[tuple[int, str]] = []
        self.use(smaller)

    @property
    def batch(self) -> int | None:
        """The batch to cut to; None: the whole batch is due."""
        return self._due[0][0] if self._due else None

    @property
    def several(self) -> bool:
        """True where the launch has more than one run."""
        return bool(self._runs)

    @property
    def run_id(self) -> str:
        """The run that is being measured."""
        return self._due[0][1] if self._due else self._run_id

    def use(self, smaller: Sequence[tuple[int, str]]) -> None:
        """Measure these batches, then the whole one; what was measured of others stays theirs."""
        self._due = list(smaller) if self.whole is not None else []
        self._runs.update(self._due)

    def next(self) -> None:
        """The batch that was due is measured."""
        del self._due[:1]

    def run_of(self, local_batch_size: int | None) -> str:
        """The run that samples of this batch belong to."""
        return self._runs.get(local_batch_size or 0, self._run_id)

    def share_of(self, local_batch_size: int | None) -> float:
        """Which share of the whole batch this is; 1 for any that is not cut."""
        if self.whole is None or local_batch_size not in self._runs:
            return 1.0
        return local_batch_size / self.whole
