"""The `tula` command, which nothing else in this package imports."""
