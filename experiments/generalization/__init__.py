"""Compares the fractions of the generalization gap that the methods for large batches close."""
