"""Runs the agent in Hugging Face transformers with a callback.

Usage: `Trainer(callbacks=[TulaTrainerCallback(dataset_size=...)])`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from tula_agent.callbacks import columns
from tula_agent.run import Run, init
from tula_agent.torch_private import ddp_model_in_forward

if TYPE_CHECKING:

    class TrainerCallback:
        """Replaces the library's class during type checking, since that class has no annotations."""

else:
    from transformers import TrainerCallback

__all__ = ["TulaTrainerCallback"]


class TulaTrainerCallback(TrainerCallback):
    """Callback that measures `train` and stops it once a profiling run has enough samples.

    The trainer loads all micro-batches of a step before it calls a callback, so the input time covers the whole step.
    `run` is the agent's run, which does nothing before training.
    """

    def __init__(self, dataset_size: int | None = None) -> None:
        self.run = Run(None)
        self._dataset_size = dataset_size
        self._pause = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        """Start the agent's run, and watch the trainer's model and optimizer."""
        self.run = init(dataset_size=self._dataset_size, grad_accum_steps=args.gradient_accumulation_steps)
        self.run.begin_at(state.epoch or 0.0)
        optimizer = others.get("optimizer")
        self.run.watch(others.get("model"), getattr(optimizer, "optimizer", optimizer))
        if args.world_size > 1 and not args.torch_compile:
            with self.run.guard("finding the wrapped model"):
                _watch_around(self.run, others["model"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        """Start timing the loop."""
        self.run.begin_loop()

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        """Begin a step.

        The trainer does not pass batches to callbacks, so this method uses an empty tensor with the same batch size
        instead.
        """
        self._pause.close()
        stand_in = torch.empty(args.train_batch_size, 0, device="cpu")
        self.run.batch_arrived(stand_in, None, args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        """End a step."""
        self.run.batch_done()
        if self.run.stopping:
            control.should_training_stop = True
            control.should_evaluate = control.should_save = False
        if control.should_evaluate or control.should_save:
            self._pause.enter_context(self.run.paused())  # until the next step begins

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        """Stop timing the loop."""
        self.run.end_loop()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:  # noqa: ARG002
        """Log the loss, the learning rate and the evaluation metrics, but not the final summary."""
        if logs and "train_runtime" not in logs:
            self.run.log(**columns(logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        """Send the remaining measurements and end the run."""
        self.run.finish()


def _watch_around(run: Run, model: Any) -> None:
    """From the first forward pass on, watch the DDP module around `model`, since callbacks receive only `model`."""

    def found(*_: Any) -> None:
        hook.remove()
        around = ddp_model_in_forward()
        if around is not None:
            run.watch(around)

    hook = model.register_forward_pre_hook(found)
