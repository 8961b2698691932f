"""The optimizers that a training loop uses."""
