"""Converts a batch schedule into an option of Megatron-LM, or into a Python module with a training callback."""

from __future__ import annotations

import math
from string import Template
from typing import Final, Literal

from tula_wire import BatchSchedule, BatchStage
from tula_wire.format import cluster_name

Target = Literal["megatron", "transformers", "lightning"]

_MODULE: Final = Template('''\
"""A batch schedule by Tula: each stage is a separate launch that resumes from the previous stage's checkpoint.

$launches

$usage
At the start of a stage, some examples of an epoch may be repeated or skipped, since the batch size changes.
"""

$imports

STAGES = [  # first step, learning rate relative to the one for a batch of $base, beta2 of Adam
$stages
]
LAST_STEP = $last
# `TulaOptimizer` raises the learning rate gradually, so if you use it, set each rate to 1.0. Without it, a sudden
# increase to several times the rate may make training diverge, so add a warm-up from the first step of the stage.


def begin_stage(step, optimizers, schedulers):
    """Set the learning rate and beta2 if `step` begins a stage; return the step at which the current stage ends."""
    number = max(place for place, (first, _, _) in enumerate(STAGES) if first <= step)
    first, rate, beta2 = STAGES[number]
    if step == first:  # a checkpoint saved within the stage already has the values
        factor = rate / (STAGES[number - 1][1] if number else 1.0)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            for name in {"lr", "initial_lr"} & group.keys():
                group[name] *= factor
            if beta2 is not None and "betas" in group:
                group["betas"] = (group["betas"][0], beta2)
        for scheduler in schedulers:
            for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
                if hasattr(part, "base_lrs"):
                    part.base_lrs = [factor * lr for lr in part.base_lrs]
    return STAGES[number + 1][0] if number + 1 < len(STAGES) else LAST_STEP


$callback''')

_TRANSFORMERS: Final = '''\
class BatchSchedule(TrainerCallback):
    """Starts the stage of this launch, and saves a checkpoint and stops at the end of the stage."""

    def on_train_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **others):
        self.end = begin_stage(state.global_step, [optimizer], [lr_scheduler])

    def on_step_end(self, args, state, control, **others):
        if state.global_step >= self.end:
            control.should_save = control.should_training_stop = True
'''

_LIGHTNING: Final = '''\
class BatchSchedule(pl.Callback):
    """Starts the stage of this launch, and saves a checkpoint and stops at the end of the stage."""

    def on_train_start(self, trainer, module):
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.end = begin_stage(trainer.global_step, trainer.optimizers, schedulers)

    def on_train_batch_end(self, trainer, *others):
        if trainer.global_step >= self.end and not trainer.should_stop:
            trainer.save_checkpoint(f"stage-{self.end}.ckpt")
            trainer.should_stop = True
'''


def write_schedule(schedule: BatchSchedule, target: Target) -> str:
    """Return a batch schedule as text for the training program `target`.

    For `megatron`, the text is the option `--step-batch-size-schedule` of Megatron-LM (pull request 4411), which lists
    pairs of a threshold and a batch. The thresholds are in tokens if the schedule has the number of tokens per example,
    else in examples; Megatron reads them as tokens if `--seq-length` is given. For `transformers` and `lightning`, the
    text is a Python module with the callback `BatchSchedule`. Raises ValueError if the schedule has no stages.
    """
    if not schedule.stages:
        raise ValueError(f"the schedule has no stages to write: {schedule.sentence}")
    if target == "megatron":
        tokens = schedule.tokens_per_example or 1.0
        pairs = (f"{math.ceil(s.first_example * tokens)}:{s.global_batch_size}" for s in schedule.stages)
        return f'--step-batch-size-schedule "{" ".join(pairs)}"'
    is_trainer = target == "transformers"
    words = (
        ("per_device_train_batch_size", "gradient_accumulation_steps")
        if is_trainer
        else ("batch_size", "accumulate_grad_batches")
    )
    use = (
        "Use TrainingArguments(max_steps=LAST_STEP, ...) and Trainer(..., callbacks=[BatchSchedule()]). From the\n"
        "second stage onwards, call train(resume_from_checkpoint=True). All launches must share one output_dir."
        if is_trainer
        else "Use Trainer(max_steps=LAST_STEP, max_epochs=-1, callbacks=[BatchSchedule()], ...). From the second\n"
        'stage onwards, call fit(..., ckpt_path="stage-STEP.ckpt"), where STEP is the first step of the stage.'
    )
    ends = [*(stage.first_step for stage in schedule.stages[1:]), schedule.steps]
    return _MODULE.substitute(
        launches="\n".join(_launch(stage, end, words) for stage, end in zip(schedule.stages, ends, strict=True)),
        usage=use,
        imports="from transformers import TrainerCallback" if is_trainer else "import lightning.pytorch as pl",
        base=schedule.base_batch_size,
        stages="\n".join(
            f"    ({s.first_step}, {s.learning_rate_factor or 1.0:.4g}, {_beta(s.beta2)})," for s in schedule.stages
        ),
        last=schedule.steps,
        callback=_TRANSFORMERS if is_trainer else _LIGHTNING,
    )


def _launch(stage: BatchStage, end: int, words: tuple[str, str]) -> str:
    """Return a line with the steps, the cluster and the batch settings of one stage."""
    c = stage.configuration
    ranks = f"{c.ranks_per_node} rank{'s' if c.ranks_per_node > 1 else ''} each"
    batch = f"{words[0]}={c.local_batch_size}, {words[1]}={c.grad_accum_steps}"
    return f"  steps {stage.first_step} to {end}: {cluster_name(c)}, {ranks}, {batch}"


def _beta(beta2: float | None) -> str:
    return "None" if beta2 is None else f"{beta2:.6g}"
