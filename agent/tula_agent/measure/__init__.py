"""What is measured inside the training process: time, communication, memory, gradients."""
