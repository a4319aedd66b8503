"""Errors of `tula tune` and `tula run`; the text of each is one sentence with the remedy."""

from __future__ import annotations

from typing import ClassVar

from tula_client._errors import TulaError


class LaunchError(TulaError):
    """Base of every error that stops `tula tune` or `tula run`."""

    exit_code: ClassVar[int] = 1


class SpecError(LaunchError):
    """The job's TOML file cannot be read or holds a wrong value."""

    exit_code = 2


class TemplateError(LaunchError):
    """The command template lacks a needed placeholder or holds an unknown one."""

    exit_code = 2


class CommandNotFoundError(LaunchError):
    """The first word of the command is not a program on this machine."""

    exit_code = 2


class WorkDirError(LaunchError):
    """The folder for logs, spools and checkpoints cannot be created or written."""

    exit_code = 2


class WorkDirBusyError(LaunchError):
    """Another `tula tune` or `tula run` of the same job holds the folder."""


class ConfigurationMismatchError(LaunchError):
    """The script ran with another batch or another number of ranks than planned."""


class TooManyFailuresError(LaunchError):
    """Runs fail one after the other: the command is probably at fault."""


class TrainingFailedError(LaunchError):
    """The training ended before its last epoch, and starting it again unchanged would not help."""
