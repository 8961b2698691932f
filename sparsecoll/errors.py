"""Exceptions that only this library raises."""


class CommunicationError(RuntimeError):
    """Ranks pass different arguments, a peer does not answer within `timeout`, or a message is invalid.

    The message names the ranks, the argument and the values.
    """


class NonFiniteError(ValueError):
    """A gradient contains NaN or infinity on some rank.

    The message names the parameter and the rank.
    """
