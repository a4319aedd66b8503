"""Implements `tula tune` and `tula run`, which profile and train a job with the user's own launch command."""
