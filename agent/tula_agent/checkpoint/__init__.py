"""`run.checkpoint` and `run.resume`: a training stopped anywhere goes on as if it had not been stopped.

A checkpoint is a folder `step-<number>` below TULA_CHECKPOINT_DIR, or `step-<number>.<n>` if it is the n-th of a step:

    training.pt       model, optimizer (with the state of gradient scaling), scheduler, GradScaler, the script's extra
    shards/           instead of the first two when the model is sharded (torch.distributed.checkpoint)
    rank-<r>.pt       of each rank: its place in the data and its random number generators
    complete.json     written last; a folder without it is never read

On CPU a resumed run is bit for bit the run that was not stopped, as long as configuration and script are the same.
What fails on one rank, writing or reading, fails on all with the same `CheckpointError`, and nobody waits for ever.
"""

from __future__ import annotations

from tula_agent.checkpoint.alike import CheckpointError
from tula_agent.checkpoint.training import Resumed, resume, roll_back, save

__all__ = ["CheckpointError", "Resumed", "resume", "roll_back", "save"]
