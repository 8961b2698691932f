"""Exceptions of the library's own."""


class CommunicationError(RuntimeError):
    """Ranks disagree on an argument, a peer did not answer within `timeout`, or a message is damaged.

    The text names the ranks, the argument and the values.
    """


class NonFiniteError(ValueError):
    """A gradient holds NaN or infinity on some rank.

    The text names the parameter and the rank.
    """
