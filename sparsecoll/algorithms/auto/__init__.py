"""The algorithm that is predicted to be the fastest, and what predicts it."""

from sparsecoll.algorithms.auto.auto import Auto

__all__ = ["Auto"]
