"""Runs the agent in Lightning 2 with a callback: `Trainer(callbacks=[TulaCallback(dataset_size=...)])`."""

from __future__ import annotations

import inspect
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from tula_agent.callbacks import columns
from tula_agent.run import GLOO_RELEASE_S, Run, init

if TYPE_CHECKING:

    class Callback:
        """Replaces Lightning's class during type checking, since its hooks are untyped."""

elif "pytorch_lightning" in sys.modules:  # the older package, if the script has imported it
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

__all__ = ["TulaCallback", "UneditedCallback"]


class TulaCallback(Callback):
    """Callback that measures `fit`, stops `fit` once a profiling run has enough samples, and reports how `fit` ended.

    If a launch measures several batch sizes, the callback cuts each batch before the trainer's strategy moves it to the
    device.

    The agent detects gradient accumulation, precision plugins and DDP through the trainer's optimizers and strategy.
    Metrics that the module logs are sent as telemetry. `run` is the agent's run, which does nothing before `fit`.
    """

    def __init__(self, dataset_size: int | None = None) -> None:
        self.run = Run(None)
        self._dataset_size = dataset_size
        self._pause = ExitStack()
        self._fit = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Start the agent's run."""
        self.run = init(dataset_size=self._dataset_size)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the model and its optimizers; the strategy's model is the DDP module if DDP is used."""
        with self.run.guard("reading the epoch of a resumed fit"):
            self.run.begin_at(_epochs_before(trainer))
        model = getattr(trainer.strategy, "model", None) or pl_module
        self.run.watch(model, list(trainer.optimizers))
        self._cut_batches(trainer, self.run)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Start timing the loop."""
        pulls = "dataloader_iter" in inspect.signature(pl_module.training_step).parameters
        self.run.begin_loop(cuts=not pulls)  # a module that pulls batches also moves them to the device

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Begin a micro-step."""
        self._pause.close()
        self.run.batch_arrived(batch, trainer.train_dataloader)

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,  # noqa: ARG002
        outputs: Any,
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """End a micro-step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self.run.log(loss=loss)
        self.run.batch_done()
        if self.run.stopping:
            trainer.should_stop = True
            trainer.fit_loop.max_epochs = trainer.current_epoch + 1  # otherwise min_epochs would continue the fit

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Stop timing the loop."""
        self.run.end_loop()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Exclude the time until the next micro-step from the measurements."""
        self._pause.enter_context(self.run.paused())

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002
        """Exclude the time until the next micro-step, since Lightning writes the checkpoint after this hook."""
        self.on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Log the validation metrics."""
        if not trainer.sanity_checking:
            metrics = columns(trainer.callback_metrics)
            metrics.pop("loss", None)  # already logged at every step
            self.run.log(**metrics)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Report the exception now, since Lightning ends some processes itself."""
        self._fit.close()
        self.run.report_exception(exception)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Send the remaining measurements and end the run."""
        self._fit.close()
        self.run.finish()

    def _cut_batches(self, trainer: Any, run: Run) -> None:
        """Until `fit` ends, move only the measured examples to the device, to save memory."""
        strategy = trainer.strategy
        to_device = strategy.batch_to_device

        def cut(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return to_device(run.cut(batch) if trainer.training else batch, *args, **kwargs)

        strategy.batch_to_device = cut
        self._fit.callback(setattr, strategy, "batch_to_device", to_device)


class UneditedCallback(TulaCallback):
    """Callback that Lightning loads from an entry point (`tula_startup`), for scripts that do not use Tula themselves.

    All fits of the script form one run, which ends with the process. Once a profiling run has enough samples, all ranks
    exit the script after the same step, without any further validation, checkpoint or `fit`.
    """

    _of_script: ClassVar[Run] = Run(None)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the agent's run, or continue the run of an earlier `fit`."""
        self.run = UneditedCallback._of_script
        if not self.run.active:
            super().on_fit_start(trainer, pl_module)
            UneditedCallback._of_script = self.run

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a micro-step."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.run.stopping:
            self._fit.close()
            self.run.finish()
            time.sleep(GLOO_RELEASE_S)  # before the exception unwinds the script's frames, which destroys the model
            raise SystemExit(0)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Keep the run open for another fit."""
        self._fit.close()


def _epochs_before(trainer: Any) -> float:
    """Return the number of epochs that a resumed fit has completed, including the fraction of an interrupted epoch."""
    epochs = trainer.fit_loop.epoch_progress.current
    left = epochs.ready > epochs.processed
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready if left else 0
    return float(epochs.processed + batches / max(1, trainer.num_training_batches))
