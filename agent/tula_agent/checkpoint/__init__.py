"""`run.checkpoint` and `run.resume`: a training stopped at any step continues as if it had not been stopped.

A checkpoint is a folder `step-<number>` below TULA_CHECKPOINT_DIR, or `step-<number>.<n>` if it is the n-th of a step:

    training.pt       model, optimizer (with the state of gradient scaling), scheduler, GradScaler, the script's extra
    shards/           instead of the first two when the model is sharded (torch.distributed.checkpoint)
    rank-<r>.pt       of each rank: its position in the data and its random number generators
    complete.json     written last; a folder without it is never read

On CPU a resumed run is bit for bit the run that was not stopped, if configuration and script are the same. A failure on
one rank, in writing or reading, raises the same `CheckpointError` on all ranks, and no rank waits for another for ever.
"""

from __future__ import annotations

from tula_agent.checkpoint.checkpoint import Resumed, resume, save
from tula_agent.checkpoint.collective import CheckpointError

__all__ = ["CheckpointError", "Resumed", "resume", "save"]
