"""The `tula` command; needs the extra `cli`, which nothing else in this package imports."""
