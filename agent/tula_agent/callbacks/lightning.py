"""`Trainer(callbacks=[TulaCallback(dataset_size=...)])`: the agent for Lightning 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tula_agent.callbacks._names import columns
from tula_agent.run import Run, init

if TYPE_CHECKING:

    class Callback:
        """Stands for Lightning's own, which has no types that help here."""

else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

__all__ = ["TulaCallback"]


class TulaCallback(Callback):
    """Measures `fit`, ends it when a profiling run has seen enough, and reports how it ended.

    Accumulation, precision plugins and DDP are seen through the trainer's optimizers and strategy. Metrics that the
    module logs become telemetry. `run` is the agent's run, once `fit` has begun.
    """

    def __init__(self, dataset_size: int | None = None, epochs: float | None = None) -> None:
        self.run: Run | None = None
        self._dataset_size = dataset_size
        self._epochs = epochs

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Join the run."""
        self.run = init(dataset_size=self._dataset_size, epochs=self._epochs or trainer.max_epochs)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Everything is built by now: the strategy's model is the DDP module where there is one."""
        if self.run is not None:
            with self.run.guard("finding where the fit goes on"):
                self.run.begin_at(_epochs_before(trainer))
            model = getattr(trainer.strategy, "model", None) or pl_module
            self.run.watch(model, list(trainer.optimizers))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """The loop begins."""
        if self.run is not None:
            self.run.begin_loop(trainer.train_dataloader)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """A batch has arrived."""
        if self.run is not None:
            self.run.batch_arrived(batch, trainer.train_dataloader)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """It is done; the trainer asks for the next."""
        if self.run is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self.run.log(loss=loss)
        self.run.batch_done()
        if self.run.stopping:
            trainer.should_stop = True
            trainer.fit_loop.max_epochs = trainer.current_epoch + 1  # a least number of epochs would keep it going

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """The loop is left."""
        if self.run is not None:
            self.run.end_loop()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """What the module logged while validating."""
        if self.run is not None and not trainer.sanity_checking:
            metrics = columns(trainer.callback_metrics)
            metrics.pop("loss", None)  # known step by step
            self.run.log(**metrics)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Lightning ends some processes itself: say why while there is time."""
        if self.run is None:
            return
        from tula_agent.oom_watch import is_out_of_memory

        if is_out_of_memory(exception):
            self.run.report_out_of_memory(exception)
        else:
            self.run.finish(succeeded=False, message=f"{type(exception).__name__}: {exception}"[:2000])

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Deliver what is left."""
        if self.run is not None:
            self.run.finish()


def _epochs_before(trainer: Any) -> float:
    """Passes that a resumed fit has behind it: whole ones, and the batches of one that was left in the middle."""
    epochs = trainer.fit_loop.epoch_progress.current
    left = epochs.ready > epochs.processed
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready if left else 0
    return float(epochs.processed + batches / max(1, trainer.num_training_batches))
