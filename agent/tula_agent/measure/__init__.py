"""Measures inside the training process: time, communication, memory, gradients."""
