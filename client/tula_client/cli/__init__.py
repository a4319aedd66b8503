"""The `tula` command. No other module of this package imports it."""
