"""Messages cut into pieces, so that one is summed while the next ones travel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sparsecoll.formats import Buffer
from sparsecoll.transport.base import PendingReceive, Transport

PIECE, MOST_PIECES = 1 << 18, 16  # bytes that a piece has at least
AHEAD = 2  # stages in flight beside the one that is worked on


def pieces(size: float, one_node: bool) -> int:
    """How many pieces to cut a message of about `size` bytes into, which are summed while others travel; 1: none.

    Between ranks on one machine it is not worth while: the processors that sum also carry the messages.
    """
    return 1 if one_node else int(min(max(size // PIECE, 1), MOST_PIECES))


def run(
    transport: Transport,
    stages: int,
    begin: Callable[[int], list[PendingReceive]],
    finish: Callable[[list[Buffer]], None],
) -> None:
    """Work on what has arrived while more is on its way.

    Args:
        begin: sends the messages of a stage, and returns the receives to wait for.
        finish: called with the messages received, stage by stage, up to AHEAD stages later.
    """
    travelling: deque[list[PendingReceive]] = deque()
    for stage in range(stages):
        travelling.append(begin(stage))
        transport.progress()
        if len(travelling) > AHEAD:
            finish([pending.wait() for pending in travelling.popleft()])
    for pending_receives in travelling:
        finish([pending.wait() for pending in pending_receives])
        transport.progress()
