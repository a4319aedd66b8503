"""Compares how much of the generalization gap each method for large batches closes."""
