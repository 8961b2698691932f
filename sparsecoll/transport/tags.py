"""Tags of messages, which identify the call and its arguments, and of stall notices and reports; what a report is."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from sparsecoll.formats import Buffer

PHASES = 4  # messages of calls that follow each other never have the same tag
ERROR_TAG, REVOKE_TAG = 0, PHASES  # the tags of reports, see `sparsecoll.transport.call`; over MPI one for each phase
STALL_TAG = REVOKE_TAG + 1  # of a stall notice, by which a rank tells another one for which tag it waits
FIRST_TAG = STALL_TAG + 1  # the lowest tag of a message
TAGS = 16383  # MPI's tags are below this, with one bit more: every MPI has 32,767 tags
NUMBERS = (TAGS - FIRST_TAG) // PHASES  # tags of a phase: by name before the ranks agree, by name with check=False,
NAMES = 509  # (a prime that gives each name in use a number of its own)
KEPT = NUMBERS - 2 * NAMES  # and one for each of the last arguments and states that the ranks have agreed on
STEPS = 64  # more than a call has, see `Transport.history`
HISTORY = 1024  # calls that are remembered
ANY, REPORT_BYTES = 1 << 63, 1 << 24  # of a message, and of a report, at most


class CallMismatch(Exception):
    """A report or a message of another call was received in place of the expected message."""


def tag_of(call: int, name: int, step: int, number: int) -> int:
    """Return the tag of a message; modulo PHASES * NUMBERS, it has the number of the call modulo PHASES and `number`.

    Args:
        call: number of the call on the communicator.
        name: number of its name.
        step: position in `Transport.history`.
        number: of the name, or of the arguments that the ranks have agreed on.
    """
    turn, phase = divmod(call, PHASES)
    return FIRST_TAG + (((turn * NAMES + name) * STEPS + step) * PHASES + phase) * NUMBERS + number


def short_tag(tag: int, calls: int) -> int:
    """Return a tag as it is sent over MPI, which has few: modulo PHASES * NUMBERS, and that of reports by phase."""
    if tag < FIRST_TAG:
        return tag + calls % PHASES if tag == ERROR_TAG else tag
    return FIRST_TAG + (tag - FIRST_TAG) % (PHASES * NUMBERS)


def parts_of(tag: int) -> tuple[int, int, int, int]:
    """Return the arguments of `tag_of`."""
    rest, number = divmod(tag - FIRST_TAG, NUMBERS)
    rest, phase = divmod(rest, PHASES)
    rest, step = divmod(rest, STEPS)
    turn, name = divmod(rest, NAMES)
    return turn * PHASES + phase, name, step, number


def report_of(why: str = "", **report: Any) -> Buffer:
    """Return a report as a message; with `why`, that of a rank by which the communicator is out of use."""
    if why:
        report |= {"broken": why, "error": {"type": "CommunicationError", "text": why}}
    return np.frombuffer(bytearray(as_json(report)), np.uint8)


def as_json(what: dict[str, Any], sort: bool = False) -> bytes:
    """Return JSON; of NumPy's scalars as of Python's, and of other objects their representation, so that none fails."""
    text = json.dumps(what, sort_keys=sort, default=lambda v: v.item() if isinstance(v, np.generic) else repr(v))
    return text.encode()
