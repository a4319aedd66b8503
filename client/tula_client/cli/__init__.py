"""Implements the `tula` command; the rest of `tula_client` does not import this sub-package."""
