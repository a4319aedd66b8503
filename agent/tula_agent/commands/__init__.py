"""Contains the sub-commands that the agent adds to `tula` through the entry-point group `tula.commands`."""
