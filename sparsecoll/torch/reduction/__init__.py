"""From gradients to means: buckets, when they are sent, whether a step was taken with them, and saved state."""
