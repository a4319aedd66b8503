"""Compares methods for large batches by the fraction of the generalization gap that they close."""
