"""Predict step time and memory of configurations that were not profiled."""
