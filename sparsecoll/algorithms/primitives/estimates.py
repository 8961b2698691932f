"""Expected numbers of messages and entries, and the costs of a processor by which algorithms are chosen."""

from __future__ import annotations

import math

from sparsecoll.formats.costs import PACKED
from sparsecoll.transport.network import Network

MANY_RANKS = 256  # from here on messages may be sent in two levels
ENTRY_BYTES = 5.25  # of an entry of float32 in the format packed, at a density of 1 %

# Magnitudes matter, digits do not.
OVERHEAD = 5e-6  # seconds of a further message in flight at the same time
CALL = 30e-6  # seconds of a kernel call, however small
MERGE = 7e-9  # seconds per input entry of a sum of sparse vectors, at a density of 1 %


def fill_in(n: int, k: float, ranks: float) -> float:
    """Return the expected nnz of the sum of `ranks` uniform, independent supports: n(1 - (1 - k/n)^ranks)."""
    if n == 0:
        return 0.0
    return n * -math.expm1(ranks * math.log1p(-min(k / n, 1 - 1e-12)))


def rounds(P: int) -> int:
    """Return ceil(log2 P)."""
    return (P - 1).bit_length()


def oktopk_split_seconds(
    n: int,
    k: int,
    P: int,
    network: Network,
    message: float = OVERHEAD + 2 * CALL,
    code: float = PACKED,
    merge: float = MERGE,
) -> tuple[float, float]:
    """Return the seconds of Ok-Topk's split and reduce in one level and in two.

    In one level a rank encodes, decodes and sums while bytes are on their way; in two it sums what has arrived of a
    level before it sends to the next one. A second level saves about P - 2 sqrt(P) messages, and sends the entries of
    the sums of sqrt(P) ranks once more.

    Args:
        message: seconds in which a rank encodes, sends and decodes a message without entries.
        code: seconds to encode and decode an entry.
        merge: seconds to add an entry.
    """
    width = math.sqrt(P)

    def level(entries: float) -> float:
        link = entries * ENTRY_BYTES * network.beta
        return network.alpha + max(link, width * message + entries * code) + entries * merge

    one = network.alpha + max(k * ENTRY_BYTES * network.beta, P * message + k * (code + merge))
    return one, level(k) + level(fill_in(n, k, width) / width)


def oktopk_levels(n: int, k: int, P: int, network: Network) -> int:
    """Return the number of levels of Ok-Topk's split and reduce that takes less time."""
    one, two = oktopk_split_seconds(n, k, P, network)
    return 2 if P >= MANY_RANKS and two < one else 1
