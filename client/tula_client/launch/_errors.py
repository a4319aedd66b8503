"""What can go wrong while launching, each said in one sentence to a person."""

from __future__ import annotations

from typing import ClassVar

from tula_client._errors import TulaError

__all__ = ["CommandNotFoundError", "LaunchError", "SpecError", "TemplateError", "WorkDirBusyError", "WorkDirError"]


class LaunchError(TulaError):
    """Base of everything that stops `tula tune` or `tula run`; its text is one sentence with the remedy."""

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
    """The folder for logs, spools and checkpoints cannot be made or written."""

    exit_code = 2


class WorkDirBusyError(LaunchError):
    """Another `tula tune` or `tula run` of the same job is at work in the same directory."""
