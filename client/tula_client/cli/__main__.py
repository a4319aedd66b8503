"""Runs `tula` as `python -m tula_client.cli`, for when the script is not on the path."""

from tula_client.cli.app import main

main()
