"""Runs the `tula` command as `python -m tula_client.cli`, for when the `tula` script is not on the PATH."""

from tula_client.cli.app import main

main()
