"""Measures time, communication, memory and gradients inside the training process."""
