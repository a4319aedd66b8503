"""How a finished command is judged: succeeded, out of memory, or failed with the reason in one sentence."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

from tula_client.launch.logs import ran_out_of_memory, relevant_lines
from tula_wire import Run, RunPatch, RunState

__all__ = ["Outcome", "judge"]

_MAX_MESSAGE: Final = 2000
_KILLED: Final = 128 + signal.SIGKILL


@dataclass(frozen=True)
class Outcome:
    """The final state of a run and why."""

    state: RunState
    message: str | None = None
    lines: tuple[str, ...] = ()
    failed_local_batch_size: int | None = None

    def patch(self, holder: str) -> RunPatch:
        """What the service is told."""
        text = self.message if not self.lines else f"{self.message} Last lines: {' | '.join(self.lines)}"
        return RunPatch(
            state=self.state,
            message=None if text is None else text[:_MAX_MESSAGE],
            failed_local_batch_size=self.failed_local_batch_size,
            holder=holder,
        )


def judge(run: Run, status: int, lines: list[str], *, timed_out_after_s: float | None = None) -> Outcome:
    """Judge exit `status` and log `lines` of `run`, as the service knows it by now.

    The agent's own verdict stands: it saw the failure from within. Without one, an exit status of 0 with samples is a
    success, status 137 (killed, as the kernel does when memory is short) or a log that names an out-of-memory is an
    out-of-memory with the run's batch, and everything else a failure.
    """
    batch = run.configuration.local_batch_size
    if timed_out_after_s is not None:
        return Outcome(
            "failed",
            f"The run was still going after its time limit of {timed_out_after_s:g} s and was stopped: the stack of "
            "each rank is in its log; raise --time-limit if it was only slow.",
        )
    if run.state == "out_of_memory" or status == _KILLED or (status != 0 and ran_out_of_memory(lines)):
        return Outcome(
            "out_of_memory",
            run.message or f"The run ran out of memory at a local batch of {batch}.",
            failed_local_batch_size=batch,
        )
    if status != 0:
        shown = tuple(relevant_lines(lines))
        return Outcome("failed", f"The command ended with exit code {status}.", shown)
    if run.state == "failed":
        return Outcome("failed", run.message or "The agent reported a failure.", tuple(relevant_lines(lines)))
    if run.num_samples == 0:
        return Outcome(
            "failed",
            "The command ended well but no measurement arrived: call tula_agent.init() and loop over "
            "run.steps(loader) in the script.",
        )
    return Outcome("succeeded")
