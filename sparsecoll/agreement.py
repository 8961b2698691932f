"""One small message round in which all ranks compare the arguments of a call, so that all raise or none does."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np

from sparsecoll.errors import CommunicationError
from sparsecoll.transport.base import Transport
from sparsecoll.transport.collectives import allgather, allgatherv


def agree(transport: Transport, call: dict[str, Any], entries: int, error: Exception | None) -> list[int]:
    """Compare `call` (argument name -> JSON value) over the ranks; returns every rank's `entries`.

    Args:
        error: what is wrong with this rank's arguments; then all ranks raise it.

    Volume: 6(P-1) words in ceil(log2 P) messages; the arguments themselves travel only when something is wrong.

    Raises:
        ValueError, TypeError: some rank's arguments are invalid; the text names the first such rank, on every rank.
        CommunicationError: ranks disagree on an argument, or a rank failed otherwise.
    """
    text = json.dumps(call, sort_keys=True)
    row = np.array([entries, zlib.crc32(text.encode()), 0 if error is None else 1], np.int64)
    with transport.phase("agree"):
        rows = allgather(transport, row)
        if not rows[:, 2].any() and (rows[:, 1] == rows[0, 1]).all():
            return [int(count) for count in rows[:, 0]]
        problem = {} if error is None else {"type": type(error).__name__, "text": str(error)}
        message = json.dumps({"call": call, "error": problem}).encode()
        blocks = allgatherv(transport, np.frombuffer(bytearray(message), np.uint8))
    transport.flush()
    reports = [json.loads(bytes(block)) for block in blocks]
    raise _raised_error(reports) from error


def _raised_error(reports: list[dict[str, Any]]) -> Exception:
    for rank, report in enumerate(reports):
        if report["error"]:
            kind, text = report["error"]["type"], report["error"]["text"]
            known = {
                "ValueError": ValueError,
                "TypeError": TypeError,
                "CommunicationError": CommunicationError,
            }
            if kind in known:
                return known[kind](f"rank {rank}: {text}")
            return CommunicationError(f"rank {rank} failed before the call: {kind}: {text}")
    return CommunicationError("; ".join(_differences([report["call"] for report in reports])))


def _differences(calls: list[dict[str, Any]]) -> list[str]:
    """One text per argument that differs: which value on which ranks."""
    texts = []
    for name in calls[0]:
        holders: dict[str, list[int]] = {}
        for rank, call in enumerate(calls):
            holders.setdefault(json.dumps(call.get(name)), []).append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on rank{_ranks(ranks)}" for value, ranks in holders.items())
            texts.append(f"{name}: expected the same value on all ranks, got {values}")
    return texts


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 8 else "")
    return f" {shown}" if len(ranks) == 1 else f"s {shown}"
