"""Options and arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or its name.")]
