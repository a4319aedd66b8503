"""Options and arguments that several commands share, so that they read alike everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or its name.")]
