"""`tula tune` and `tula run`: profile and train a job with the user's own launch command."""
