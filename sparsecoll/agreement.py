"""Calls in which all ranks raise the same error or none does, and the arguments of which all ranks compare.

Every message carries a stamp (MPI's tag) of the call that it belongs to: the call's number on the communicator and a
checksum of its arguments. So a rank that is in another call is noticed at no cost by whoever hears of it first. That
rank, like one in which something was raised, reports to all others what it is in and what happened, and reads on each
channel up to the other's report, which drops what was under way. Whoever waits for a message and finds a report does
the same. Then all ranks have all reports and all channels are empty: the communicator stays usable.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from sparsecoll.errors import CommunicationError, NonFiniteError
from sparsecoll.transport.base import FIRST_STAMP, STAMPS, Interrupted, Transport
from sparsecoll.transport.collectives import allgather

KEPT = 4096  # calls that are remembered as agreed
KNOWN = {kind.__name__: kind for kind in (ValueError, TypeError, CommunicationError, NonFiniteError)}


class Conversation:
    """One call on a transport; see `together`.

    Attributes:
        call: what ranks compare, argument name -> JSON value. Filled in as soon as it is known: reports show it.
    """

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport = transport
        self.call: dict[str, Any] = {"call": name}
        transport.calls += 1
        self._stamp(zlib.crc32(name.encode()))

    def _stamp(self, checksum: int) -> None:
        mixed = (checksum ^ self._transport.calls * 2654435761) >> 3
        self._transport.stamp = FIRST_STAMP + mixed % (STAMPS - FIRST_STAMP)

    def agree(self, entries: int | None = None, check: bool = True) -> list[int]:
        """Compare `call` over the ranks, now and by all messages that follow.

        Args:
            entries: a number to tell all ranks.
            check: False compares nothing.

        Returns:
            Every rank's `entries`; nothing if it is None.

        Volume: 4(P-1) words in ceil(log2 P) messages, if this call is new on the transport or has `entries`; else none.

        Raises:
            CommunicationError: arguments differ.
        """
        transport = self._transport
        checksum = zlib.crc32(json.dumps(self.call, sort_keys=True).encode()) if check else 0
        counts: list[int] = []
        if entries is not None or (check and checksum not in transport.agreed):
            row = np.array([-1 if entries is None else entries, checksum], np.int64)
            with transport.phase("agree"):
                rows = allgather(transport, row)
            if (rows[:, 1] != checksum).any() or (rows[:, 0] < 0).any() != (entries is None):
                raise Interrupted("ranks disagree")
            if len(transport.agreed) >= KEPT:
                transport.agreed.clear()
            transport.agreed.add(checksum)
            counts = rows[:, 0].tolist() if entries is not None else []
        self._stamp(checksum)
        return counts


@contextlib.contextmanager
def together(transport: Transport, name: str, timeout: float | None) -> Iterator[Conversation]:
    """Whatever is raised inside on some rank is raised on all; collective.

    Args:
        name: of the call, for messages to users.
        timeout: seconds to wait for a message; see Transport.

    A rank that has finished the call when another one fails in it raises in its next call.

    Raises:
        ValueError, TypeError: raised on some rank; the text names the first such rank, on every rank.
        CommunicationError: ranks disagree on an argument, or a rank failed otherwise.
    """
    outer = transport.stamp, transport.timeout
    transport.timeout = timeout
    conversation = Conversation(transport, name)
    try:
        yield conversation
    except Exception as error:
        if getattr(error, "on_all_ranks", False):
            raise
        agreed = _settle(transport, conversation.call, error)
        agreed.on_all_ranks = True  # type: ignore[attr-defined]
        raise agreed from error
    finally:
        transport.stamp, transport.timeout = outer


def _settle(transport: Transport, call: dict[str, Any], error: Exception) -> Exception:
    """Tell all ranks, hear from all, and return what all of them raise."""
    report: dict[str, Any] = {"call": call, "number": transport.calls, "error": None}
    if not isinstance(error, Interrupted):
        report["error"] = {"type": type(error).__name__, "text": str(error)}
    if transport.broken:
        report["broken"] = transport.broken
        transport.announce(_bytes(report))
        return error
    transport.forget()
    try:
        blocks = transport.exchange(_bytes(report))
    except CommunicationError as unanswered:  # the communicator is broken
        if report["error"] is None:
            return unanswered
        return CommunicationError(f"rank {transport.rank}: {report['error']['text']}; then {unanswered}")
    reports = [json.loads(bytes(block)) for block in blocks if block is not None]
    for other in reports:
        if other.get("broken"):
            transport.broken = other["broken"]
            transport.announce(_bytes(report | {"broken": other["broken"], "error": other["error"]}))
            return CommunicationError(other["error"]["text"])
    reports.insert(transport.rank, report)
    transport.calls = max(other["number"] for other in reports)
    return _raised_error(reports)


def _bytes(report: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(json.dumps(report).encode()), np.uint8)


def _raised_error(reports: list[dict[str, Any]]) -> Exception:
    for rank, report in enumerate(reports):
        if report["error"]:
            kind, text = report["error"]["type"], report["error"]["text"]
            if kind in KNOWN:
                return KNOWN[kind](f"rank {rank}: {text}")
            return CommunicationError(f"rank {rank} failed: {kind}: {text}")
    different = _differences([report["call"] for report in reports])
    if not different:
        different = _differences([{"calls on this communicator": report["number"]} for report in reports])
    return CommunicationError("; ".join(different) or "ranks: expected the same calls on all of them, got others")


def _differences(calls: list[dict[str, Any]]) -> list[str]:
    """One text per argument that differs: which value on which ranks."""
    texts = []
    for name in dict.fromkeys(name for call in calls for name in call):
        holders: dict[str, list[int]] = {}
        for rank, call in enumerate(calls):
            holders.setdefault(json.dumps(call[name]) if name in call else "nothing", []).append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on rank{_ranks(ranks)}" for value, ranks in holders.items())
            texts.append(f"{name}: expected the same value on all ranks, got {values}")
    return texts


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 8 else "")
    return f" {shown}" if len(ranks) == 1 else f"s {shown}"
