"""Tensors of torch: those of a model by name, in flat vectors, on a device; and what torch keeps private."""
