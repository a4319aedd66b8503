"""From a job's specification to trained weights on the user's own launcher."""

from __future__ import annotations

from tula_client.launch._errors import (
    CommandNotFoundError,
    LaunchError,
    SpecError,
    TemplateError,
    WorkDirBusyError,
    WorkDirError,
)
from tula_client.launch.fallback import Fallback, next_smaller
from tula_client.launch.launchers import LAUNCHERS, Launcher, with_launcher
from tula_client.launch.outcome import Outcome, judge
from tula_client.launch.process import Process, start
from tula_client.launch.registration import Registered, register
from tula_client.launch.report import Reporter, Silent
from tula_client.launch.runner import Runner, RunnerOptions
from tula_client.launch.service import Service
from tula_client.launch.spec import idempotency_key, load_spec
from tula_client.launch.template import PLACEHOLDERS, Template
from tula_client.launch.train import Trained, TrainingFailedError, TrainOptions, train
from tula_client.launch.tune import PlanOptions, TooManyFailuresError, Tuned, work_through
from tula_client.launch.workdir import WorkDir

__all__ = [
    "LAUNCHERS",
    "PLACEHOLDERS",
    "CommandNotFoundError",
    "Fallback",
    "LaunchError",
    "Launcher",
    "Outcome",
    "PlanOptions",
    "Process",
    "Registered",
    "Reporter",
    "Runner",
    "RunnerOptions",
    "Service",
    "Silent",
    "SpecError",
    "Template",
    "TemplateError",
    "TooManyFailuresError",
    "TrainOptions",
    "Trained",
    "TrainingFailedError",
    "Tuned",
    "WorkDir",
    "WorkDirBusyError",
    "WorkDirError",
    "idempotency_key",
    "judge",
    "load_spec",
    "next_smaller",
    "register",
    "start",
    "train",
    "with_launcher",
    "work_through",
]
