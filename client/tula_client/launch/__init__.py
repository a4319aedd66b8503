"""`tula tune` and `tula run`: from a job's specification to trained weights with the user's own launch command."""
