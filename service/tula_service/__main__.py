"""Allows the service to be run as `python -m tula_service` if the `tula` command is not installed."""

from __future__ import annotations

import typer

from tula_service.cli import migrate, prune, serve, token

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("serve")(serve)
app.command("migrate")(migrate)
app.command("prune")(prune)
app.add_typer(token, name="token")

if __name__ == "__main__":
    app()
