"""Calls in which all ranks raise the same error or none does, and whose arguments all ranks compare.

The tag of each message identifies its call: it holds the number of the call on the communicator (over MPI, modulo
PHASES) and a number for the arguments, together with the state that an algorithm object keeps between calls. All ranks
give these their number when they have agreed on them: by messages, or because a call in which they agreed has left that
state. So different arguments or states never share a number.

Ranks in different calls may also wait for each other without a message between them. So a rank that has waited for a
while sends the rank for which it waits the tag that it expects. That rank compares it with the tags of its own calls
while it waits itself. That finds every difference for which ranks would wait for ever: tests/transport/test_mismatch.py
proves it.

A rank that receives a message with another tag, or on which an exception is raised, sends a report to all ranks: its
arguments and its exception. Then it reads from each rank up to that rank's report, and discards the messages before it.
A rank that finds a report in place of a message does the same. In the end every rank has all reports, no message is
left, and the communicator stays usable.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
import zlib
from itertools import zip_longest
from types import TracebackType
from typing import Any

import numpy as np

from sparsecoll.errors import CommunicationError, NonFiniteError, is_known
from sparsecoll.formats import Buffer
from sparsecoll.transport.all_ranks import FEW_RANKS, allgather, allgatherv, disseminate, node_members
from sparsecoll.transport.base import Transport
from sparsecoll.transport.tags import ANY, FIRST_TAG, HISTORY, KEPT, NAMES, CallMismatch, as_json, report_of, tag_of
from sparsecoll.transport.waiting import check_environment, check_timeout, out_of_use, usable

STATELESS = (0, 0)
ROW = struct.Struct("<qq")  # a rank's number of entries and checksum of arguments
AGREEMENT_BYTES = ROW.size
REPORT_SECONDS = 60.0  # how long a rank that failed waits for the reports of the others, if the call has no timeout
TEXT_SENT = 1 << 20  # characters of an exception
VALUE_SHOWN, VALUES_SHOWN, ARGUMENTS_SHOWN = 120, 4, 3  # characters; values of an argument, arguments in an error
KNOWN = {kind.__name__: kind for kind in (ValueError, TypeError, CommunicationError, NonFiniteError)}


class CollectiveCall:
    """Context manager of one collective call: an exception inside it on some rank is raised on all ranks.

    A rank that has finished the call when another one fails in it raises in its next call. The rank that failed waits
    for that, for `timeout` or REPORT_SECONDS, and logs its exception after a second; then it raises alone, and the
    communicator is broken. Calls may be nested.

    Args:
        transport: the communicator.
        name: name of the call, for error messages.
        timeout: seconds to wait for a message, above 0; None, the default, for no limit.
        failed: an exception of this rank, raised before any message; None, the default, for none.

    Attributes:
        name: name of the call.
        signature: dict from argument name to a JSON value, which the ranks compare and which reports show. Add
            arguments as soon as they are known.
        state: `Algorithm.replicated_state`, which the ranks compare as they compare the arguments; STATELESS, the
            default, for none. Set it before `agree`.
        gathered: every rank's message, see `agree`.

    Raises:
        ValueError, TypeError: Raised on some rank; the text, the same on every rank, names the first such rank. Also if
            SPARSECOLL_ON_TIMEOUT has a value that means nothing.
        CommunicationError: Arguments differ, or a rank failed with another exception.
    """

    def __init__(
        self, transport: Transport, name: str, timeout: float | None = None, failed: Exception | None = None
    ) -> None:
        self.transport, self.name = transport, name
        self.signature: dict[str, Any] = {"call": name}
        self._number_of_name = number_of_name(name)
        self._timeout, self._failed = timeout, failed
        self.state = STATELESS
        self._checksum: int | None = None  # of arguments that the ranks have compared
        self.gathered: list[Buffer] = []

    def __enter__(self) -> CollectiveCall:
        transport = self.transport
        self._outer = transport.tag, transport.timeout, transport.room
        self._start = transport.now()
        try:
            transport.timeout, transport.room = self._timeout if usable(self._timeout) else None, ANY
            self._call = transport.calls = transport.calls + 1
            self._numbers = transport.history[self._call] = []
            transport.history.pop(self._call - HISTORY, None)
            self._set_tag(self._number_of_name)
            check_timeout(self._timeout)
            if self._failed is not None:
                raise self._failed
            if transport.nodes is None:
                check_environment()
                with transport.set_up():
                    node_members(transport)
                self._start = transport.now()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        transport, known = self.transport, error is None or is_known(error, self.transport)
        try:
            if isinstance(error, Exception) and not known:
                agreed = _resolve_failure(transport, self.signature, self.state, error)
                agreed.on_all_ranks, known = transport.number, True  # type: ignore[attr-defined]
                raise agreed from error
        finally:
            if not known:
                transport.interrupt(f"{self.name} was interrupted on rank {transport.rank}")
            transport.tag, transport.timeout, transport.room = self._outer
            if transport.tag == FIRST_TAG:  # not inside another call
                transport.traffic.total.seconds += transport.now() - self._start
            if transport.traffic.observer is not None:
                transport.traffic.observer(self.signature.get("algo", self.name).split("(")[0].split()[0])

    def _set_tag(self, number: int) -> None:
        self.transport.tag = tag_of(self._call, self._number_of_name, len(self._numbers), number)
        self._numbers.append(number)

    def agree(
        self,
        entries: int | None = None,
        check: bool = True,
        message: Buffer | None = None,
        checksum: int | None = None,
        every: bool = True,
    ) -> list[int]:
        """Compare `signature` and `state` on all ranks, now if they are new, and by the tags of messages that follow.

        Calls within this one come after it.

        Args:
            entries: a number for all ranks to know; None, the default, for none.
            check: False compares nothing (default: True).
            message: a message for all ranks, on all of them or on none, with AGREEMENT_BYTES at its end that are used
                here; None, the default, for none. `gathered` then has those of all ranks, without these bytes.
            checksum: of `signature`, if it is known; None, the default, computes it.
            every: whether all ranks' `entries` are needed (default: True).

        Returns:
            Every rank's `entries`, in rank order; without `every` perhaps only the smallest and the largest of them. An
            empty list if it is None.

        Volume: 4(P-1) words in ceil(log2 P) messages if arguments or state are new or `entries` is given; otherwise
        none. With more than FEW_RANKS ranks, 8 ceil(log2 P) words if neither a message nor `every` is asked for.

        Raises:
            CallMismatch: Arguments differ; the call then raises CommunicationError on all ranks.
        """
        transport = self.transport
        if checksum is None or not check:
            checksum = self.checksum() if check else 0
        key = stamped(checksum, self.state) if check else 0
        counts: list[int] = []
        if entries is not None or (check and key not in transport.agreed):
            self._set_tag(self._numbers[-1])
            row = (-1 if entries is None else entries, key)
            reduced = message is None and transport.size > FEW_RANKS and (entries is None or not every)
            try:
                rows = self._extremes(row) if reduced else self._rows(row, message)
            except (CommunicationError, ValueError, struct.error) as error:  # messages of a rank in another call
                if transport.broken:
                    raise
                raise CallMismatch("ranks disagree") from error
            held, keys = zip(*rows, strict=True)
            if set(keys) != {key} or (min(held) < 0) != (entries is None):
                raise CallMismatch("ranks disagree")
            counts = list(held) if entries is not None else []
        else:
            self._numbers.append(-1)
        self._checksum = checksum if check else None
        self._set_tag(self._number_of(key) if check else NAMES + self._number_of_name)
        return counts

    def leaves(self, state: tuple[int, int]) -> None:
        """Record the state in which this call leaves the algorithm object, the same on all ranks, as agreed on."""
        if self._checksum is not None and state != STATELESS:
            self.record(self._checksum, state)

    def record(self, checksum: int, state: tuple[int, int]) -> None:
        """Record a signature and a state that follow, on all ranks, from what they have agreed on."""
        self._number_of(stamped(checksum, state))

    def checksum(self) -> int:
        """Return a checksum of `signature`."""
        text = as_json(self.signature, sort=True)
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)

    def _rows(self, row: tuple[int, int], message: Buffer | None) -> list[tuple[int, int]]:
        """Return every rank's row, and set `gathered` to every rank's message."""
        transport = self.transport
        if message is None:
            with transport.phase("agree"):
                return list(map(tuple, allgather(transport, np.array(row, np.int64)).tolist()))
        ROW.pack_into(message, message.size - AGREEMENT_BYTES, *row)
        with transport.phase("gather" if message.size > AGREEMENT_BYTES else "agree"):
            blocks = allgatherv(transport, message)
        rows: list[Any] = [ROW.unpack_from(block, block.size - AGREEMENT_BYTES) for block in blocks]
        self.gathered = [block[:-AGREEMENT_BYTES] for block in blocks]
        return rows

    def _extremes(self, row: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the smallest and the largest item of all ranks' rows, in two rows."""
        own = np.array(row, np.int64)
        row_and_reverse = np.concatenate([own, ~own])  # ~ reverses the order, without an overflow
        with self.transport.phase("agree"):
            most, least = disseminate(self.transport, row_and_reverse, np.maximum).reshape(2, -1)
        return [tuple((~least).tolist()), tuple(most.tolist())]

    def _number_of(self, key: int) -> int:
        """Return the number of an agreement, the same on all ranks, which agree in the same order.

        If all numbers are in use, it is the least recently used one.
        """
        agreed = self.transport.agreed
        if (number := agreed.pop(key, None)) is None:
            number = len(agreed) if len(agreed) < KEPT else agreed.pop(next(iter(agreed)))
        agreed[key] = number
        return 2 * NAMES + number


def stamped(checksum: int, state: tuple[int, int]) -> int:
    """Return a checksum of arguments and state; another one for each state with the same arguments."""
    calls, digest = state
    return checksum ^ (calls % (1 << 31) << 32) ^ digest


@functools.cache
def number_of_name(name: str) -> int:
    """Return the number that stands for a call until the ranks agree on its arguments."""
    return zlib.crc32(name.encode()) % NAMES


def _resolve_failure(transport: Transport, call: dict[str, Any], state: tuple[int, int], error: Exception) -> Exception:
    """Exchange reports with all ranks, and return the exception that all of them raise."""
    if transport.broken and isinstance(error, CallMismatch):
        error = out_of_use(transport.broken, transport.cure)
    report: dict[str, Any] = {"call": call, "state": state, "number": transport.calls, "error": None}
    report["request"] = transport.requests.last if transport.requests else 0
    if not isinstance(error, CallMismatch):
        report["error"] = {"type": type(error).__name__, "text": str(error)[:TEXT_SENT]}
    if transport.broken:
        report["broken"] = transport.broken
        transport.revoke(report_of(**report))
        return error
    transport.reset()
    transport.timeout = transport.timeout or REPORT_SECONDS
    try:
        blocks = transport.exchange_errors(report_of(**report), None if report["error"] is None else error)
    except CommunicationError as unanswered:
        transport.broken = transport.broken or str(unanswered)
        if report["error"] is None:
            return unanswered
        own = f"rank {transport.rank} failed: {report['error']['type']}: {report['error']['text']}"
        return CommunicationError(f"{own}; then {unanswered}; the communicator is out of use")
    reports = [json.loads(bytes(block)) for block in blocks if block is not None]
    for other in reports:
        if other.get("broken"):
            transport.broken = other["broken"]
            transport.revoke(report_of(**report | {"broken": other["broken"], "error": other["error"]}))
            return CommunicationError(other["error"]["text"])
    reports.insert(transport.rank, json.loads(bytes(report_of(**report))))
    transport.calls, raised = max(other["number"] for other in reports), _raised_error(reports)
    if transport.requests:
        transport.requests.fail(max(other["request"] for other in reports), raised)
    return raised


def _raised_error(reports: list[dict[str, Any]]) -> Exception:
    for rank, report in enumerate(reports):
        if report["error"]:
            kind, text = report["error"]["type"], report["error"]["text"]
            if kind in KNOWN:
                return KNOWN[kind](f"rank {rank}: {text}")
            return CommunicationError(f"rank {rank} failed: {kind}: {text}")
    calls = [report["call"] for report in reports]
    if not (different := _different_kinds(calls) or _differences(calls)):
        different = _differences([{"calls on this communicator": report["number"]} for report in reports])
        different = different or _different_states([tuple(report["state"]) for report in reports])
    return CommunicationError("; ".join(different) or "ranks: expected the same calls on all of them, got others")


def _different_kinds(calls: list[dict[str, Any]]) -> list[str]:
    """Return a text if x is of different kinds in the same call: then most of the other arguments differ, too."""
    kinds = [
        "a type with keys" if call.get("keyed") else call["x"] if "n" in call else "a vector"
        for call in calls
        if {"keyed", "length", "n"} & call.keys()
    ]
    same_call = len(kinds) == len(calls) and len({call["call"] for call in calls}) == 1
    return _differences([{"x": kind} for kind in kinds]) if same_call else []


def _different_states(states: list[tuple[int, int]]) -> list[str]:
    """Return a text if the state of the algorithm object differs between ranks."""
    if len(set(states)) == 1:
        return []
    made = _differences([{"calls that the algorithm object has made": calls} for calls, _ in states])
    differs = made or ["the state of the algorithm object differs between ranks"]
    cure = "use one object per communicator, in the same calls on all ranks, and load the same checkpoint everywhere"
    return [*differs, cure]


def _differences(calls: list[dict[str, Any]]) -> list[str]:
    """Return a text for each argument that differs: which value on which ranks. At most a screen of them."""
    texts = []
    for name in dict.fromkeys(name for call in calls for name in call):
        holders: dict[str, list[int]] = {}
        for rank, call in enumerate(calls):
            holders.setdefault(repr(call[name]) if name in call else "nothing", []).append(rank)
        if len(holders) > 1:
            shown = _shortened([*holders][:VALUES_SHOWN])
            values = [f"{value} on rank{_ranks(ranks)}" for value, ranks in zip(shown, holders.values(), strict=False)]
            more = len(holders) - len(shown)
            values += [f"and {more} other values"] if more else []
            texts.append(f"{name}: expected the same value on all ranks, got {', '.join(values)}")
    more = len(texts) - ARGUMENTS_SHOWN
    return texts[:ARGUMENTS_SHOWN] + ([f"and {more} more arguments"] if more > 0 else [])


def _shortened(texts: list[str]) -> list[str]:
    """Shorten long texts to the part from which they differ."""
    if max(map(len, texts)) <= VALUE_SHOWN:
        return texts
    start = next(i for i, letters in enumerate(zip_longest(*texts)) if len(set(letters)) > 1)
    skipped = max(0, start - VALUE_SHOWN // 3)
    texts = [f"{'...' if skipped else ''}{text[skipped:]}" for text in texts]
    return [text if len(text) <= VALUE_SHOWN else text[: VALUE_SHOWN - 3] + "..." for text in texts]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 8 else "")
    return f" {shown}" if len(ranks) == 1 else f"s {shown}"
