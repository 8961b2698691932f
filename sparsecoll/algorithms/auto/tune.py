"""Measures the costs of a communicator by which `auto` decides: of a message, a byte, an entry, and of whole calls.

`tune` measures thoroughly. `tuning_of` uses costs that are known, or measures briefly, once for all communicators of
the same processes.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsecoll import formats
from sparsecoll.algorithms.auto import costmodel
from sparsecoll.algorithms.base import Algorithm
from sparsecoll.algorithms.primitives import estimates
from sparsecoll.kernels import host_kernels
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.call import AGREEMENT_BYTES, CollectiveCall
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.collectives import allgather, node_members
from sparsecoll.transport.network import Tuning, given_tuning
from sparsecoll.vector import DenseVector, SparseVector

IN_CALLS = 1.6  # how many times as long sums, encoding and decoding take in calls as alone: their data are in no cache
LATENCY_BYTES = 8  # size of the messages that measure latency
FEW = 8  # by which the entries of kernels are divided, to tell what a call takes however few they are
BURST_MESSAGES = 16  # number of messages in flight at once that measure `overhead`


@dataclass(frozen=True)
class Effort:
    """How thoroughly to measure.

    Args:
        warm: number of rounds before the timed ones; a connection reaches its speed only after some messages.
        repeats: number of timed rounds.
        large: bytes of the messages that measure bandwidth.
        entries: number of entries of the vectors that are encoded and merged.
        values: number of values of the dense vector.
        native: bytes of the arrays that are summed by MPI's own allreduce; in one node also LONG_IN_ONE_NODE.
    """

    warm: int
    repeats: int
    large: int
    entries: int
    values: int
    native: tuple[int, ...]


THOROUGH = Effort(3, 9, large=1 << 20, entries=1 << 15, values=1 << 21, native=(1 << 12, 1 << 18, 1 << 20, 1 << 22))
BRIEF = Effort(6, 7, large=1 << 18, entries=1 << 13, values=1 << 18, native=(1 << 12, 1 << 18))
LONG_IN_ONE_NODE = 1 << 21  # bytes of an array that moves quickly in memory
LONG_BETWEEN_NODES = 1 << 22  # bytes of the messages that measure bandwidth and copies unless one takes LONGEST
QUICK, LONGEST = 1e-3, 50e-3  # seconds; of those of `Effort.large` that are QUICK, several are sent
SHARING_SECONDS = 30e-3  # some time slices
MOST_SHARING = 4.0  # more is what a moment shows in which others computed
SHORT_ENTRIES = 16  # of a short call: without any, there is nothing to encode, decode and sum
SHORT_TURNS, SHORT_WARM = 15, 20  # the interpreter reaches its speed after some twenty calls
CALLS = [(18, 18), (18, 4), (22, 4), (24, 4)]  # whole calls: log2 of n * P and of n / k
DENSE = CALLS[1:3]  # those of the dense sum, whose time depends on n above all
MIN_LENGTH = 1 << 14  # smallest n
MIN_TURNS, MAX_TURNS, MAX_SECONDS = 2, 15, 0.15  # a call is repeated until MAX_SECONDS have passed, so many times
BRIEF_CALLS, BRIEF_SECONDS = [(19, 4), (21, 4), (19, 4)], 8e-3  # of a brief measurement: short ones at two moments
MOST_BRIEF = 15e-3  # seconds that one of them may take
FADES = 8  # times as long as the longest of them, calls may be off in another way


def tune(comm: Any) -> Tuning:
    """Measure alpha, beta, the speed of the kernels and whole calls; collective.

    First, messages go round a ring, from all ranks at once, each after a little computation, as in an allreduce. Times
    are lower quartiles (longer times are noise), then the largest over the ranks. Then each choice of `auto` is called
    with 1 to 2^20 / P entries per rank, which shows what predictions from single costs miss, above all waiting and
    shared cores. The simulator needs no such calls; its computation has the costs given to `simulate`.

    Volume: some 350 MB per rank, counted as `Traffic.set_up`; some 3 s on 4 ranks with 1 Gb/s.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.

    Returns:
        Tuning, the same on every rank. It is not used by itself: save it for SPARSECOLL_TUNING (`Tuning.save`), or pass
        it to `sparsecoll.Auto(tuning=...)`.

    Raises:
        CommunicationError: On every rank, if one of them fails.

    See Also:
        `sparsecoll tune --save FILE` on the command line.
    """
    transport = as_transport(comm)
    with transport.set_up():
        node_members(transport)
        tuning = _measured(transport, THOROUGH)
        if transport.size > 1 and not transport.virtual:
            tuning = replace(tuning, calls=_whole_calls(transport, tuning))
        transport.waitall()
    return tuning


def tuning_of(transport: Transport) -> Tuning:
    """Return the given costs (see `given_tuning`), or those measured on this communicator, before or now.

    If no costs are given, the first call on a communicator and the first one after a failure are collective.

    A measurement serves all communicators of the same processes in the same order, and survives calls that fail; ranks
    check with a message of 4 bytes from each that all still have the same one.

    Volume: at most 60 MB per rank, counted as `Traffic.set_up`.
    """
    given = given_tuning(transport)
    if given is not None:
        return given
    if transport.tuning is None:
        with transport.set_up():
            node_members(transport)
            known = transport.measured
            checksum = 0 if known is None else zlib.crc32(repr(known).encode()) | 1
            checksums = allgather(transport, np.array([checksum], np.uint32))
            if known is None or (checksums != checksum).any():
                known = _measured(transport, BRIEF)
                if transport.size > 1 and not transport.virtual:
                    known = replace(known, calls=_brief_calls(transport, known))
                transport.waitall()
        transport.tuning = transport.measured = known
    return transport.tuning


def _measured(transport: Transport, effort: Effort) -> Tuning:
    """Return the costs of messages and kernels, without whole calls; collective."""
    if not transport.virtual:
        host_kernels()  # small arrays would do without them at first
    one = _uniform(effort.entries, 100 * effort.entries)._slice_entries(0, 1)

    def small_work() -> None:
        formats.decode(formats.encode(one), one.length)
        SparseVector.merge([one, one], one.dtype)

    sizes = sorted({*effort.native, *([LONG_IN_ONE_NODE] if transport.one_node else [])})
    times = [
        _together(transport, replace(effort, warm=max(effort.warm, SHORT_WARM)), small_work),
        _ring(transport, effort, LATENCY_BYTES),
        _ring(transport, effort, LATENCY_BYTES, BURST_MESSAGES),
        *_long_ring(transport, effort, effort.large),
        _lower_quartile(transport, effort, small_work),
        *_kernels(transport, effort),
        *(_native(transport, effort, size) for size in sizes),
    ]
    slowest = _slowest(transport, times)
    worked, small, burst, large, copy, call, merge, code, dense = slowest[:9]
    native = [row for row in zip(map(float, sizes), slowest[9:], strict=True) if row[1] < math.inf]
    rounds = max(estimates.rounds(transport.size), 1)
    alpha = max((worked - call) / rounds, small) if transport.size > 1 else 0.0
    overhead = max(burst - small, 0.0) / (BURST_MESSAGES - 1)
    beta = max(large - small, 0.0) / (effort.large - LATENCY_BYTES)
    long = not (transport.one_node or transport.virtual) and beta * LONG_BETWEEN_NODES < LONGEST
    if long:
        # shorter messages fit buffers on the way, which are faster than the link, and ranks poll while waiting for them
        longer = replace(effort, warm=1, repeats=3) if large < QUICK else replace(effort, warm=0, repeats=1)
        took, copy = _slowest(transport, _long_ring(transport, longer, LONG_BETWEEN_NODES))
        beta = max(beta, (took - small) / (LONG_BETWEEN_NODES - LATENCY_BYTES))
    measured = Tuning(alpha, overhead, beta, call / 3)
    modelled = transport.modelled()
    if modelled is not None:  # the simulator's clock stands still while kernels run
        return replace(measured, call=modelled.call, merge=modelled.merge, code=modelled.code, dense=modelled.dense)
    sharing = _sharing(transport, small_work)
    again = long and large < QUICK  # at other moments: once is not enough where a message takes a time slice or two

    def beta_now() -> float:
        took, _ = _slowest(transport, _long_ring(transport, replace(longer, warm=0), LONG_BETWEEN_NODES))
        return (took - small) / (LONG_BETWEEN_NODES - LATENCY_BYTES)

    betas = [beta, beta_now()] if again else [beta]
    measured = replace(
        measured,
        beta=beta,
        call=sharing * measured.call,
        merge=IN_CALLS * sharing * merge / effort.entries,
        code=IN_CALLS * sharing * code / effort.entries,
        dense=sharing * dense / effort.values,
        native=native,
        sharing=sharing,
        copy=min(sharing * copy, beta),
    )
    fixed = _fixed(transport, measured)
    if again:
        beta = float(np.median([*betas, beta_now()]))
        measured = replace(measured, beta=beta, copy=min(sharing * copy, beta))
    return replace(measured, fixed=min(fixed, _fixed(transport, measured)))


def _slowest(transport: Transport, times: list[float]) -> list[float]:
    """Return the largest over the ranks of each time."""
    return allgather(transport, np.array(times)).max(axis=0).tolist()  # type: ignore[no-any-return]


def _sharing(transport: Transport, work: Callable[[], object]) -> float:
    """Return the seconds of `work` on all ranks at once, divided by their processor time.

    A call that takes less than a time slice of the operating system does not show that ranks share a core.
    """
    if transport.size == 1:
        return 1.0
    allgather(transport, np.zeros(1, np.uint8))  # they begin together
    start, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < SHARING_SECONDS:
        work()
    took, used = time.perf_counter() - start, time.thread_time() - used
    took, used = allgather(transport, np.array([took, max(used, took / MOST_SHARING)])).sum(axis=0).tolist()
    return float(max(took / used, 1.0))


def _fixed(transport: Transport, measured: Tuning) -> float:
    """Return the seconds of a short call beyond what is predicted, where ranks that share a core delay each other.

    They are negative if the call takes less than that, down to the time of comparing the arguments.
    """
    if transport.size == 1:
        return 0.0
    shape = _short(transport)
    took = _whole(transport, measured, "allgather", shape, turns=SHORT_TURNS)
    predicted = costmodel.seconds(shape, measured)["allgather"]
    return max(took - predicted, -costmodel.agreement(transport.size, measured))


def _untimed(transport: Transport, measured: Tuning) -> float:
    """Return the seconds of a call beyond `_call_seconds`, in which no arguments are validated or compared."""
    return costmodel.agreement(transport.size, measured) + 2 * measured.call  # validating takes as long as two kernels


def _whole_calls(transport: Transport, tuning: Tuning) -> dict[str, list[tuple[float, float]]]:
    """Return (predicted seconds, measured seconds) of calls of growing size, for each choice of `auto`."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name in costmodel.CHOICES:
        if name != "native":  # measured by itself
            shapes = [_shape(transport, *call) for call in (DENSE if name == "dense" else CALLS)]
            predicted = [costmodel.seconds(shape, tuning)[name] for shape in shapes]
            found[name] = sorted(zip(predicted, [_whole(transport, tuning, name, s) for s in shapes], strict=True))
    return found


def _brief_calls(transport: Transport, tuning: Tuning) -> dict[str, list[tuple[float, float]]]:
    """Return the same of a few calls of allgather, as if all choices that send entries were as far off as it is."""
    took: dict[costmodel.Shape, float] = {}
    for call in BRIEF_CALLS:
        shape = _shape(transport, *call)
        if costmodel.seconds(shape, tuning)["allgather"] < MOST_BRIEF:
            seconds = _whole(transport, tuning, "allgather", shape, seconds=BRIEF_SECONDS)
            took[shape] = min(seconds, took.get(shape, math.inf))
    shapes = [_short(transport), *took]  # `fixed` has corrected the first
    off = [1.0, *(seconds / costmodel.seconds(s, tuning)["allgather"] for s, seconds in took.items())]
    found: dict[str, list[tuple[float, float]]] = {}
    for name in costmodel.CHOICES:  # in the same order on all ranks, which compare checksums
        if name in ("native", "dense"):
            continue
        predicted = [costmodel.seconds(shape, tuning)[name] for shape in shapes]
        beyond = FADES * predicted[-1]
        found[name] = sorted([*((s, s * share) for s, share in zip(predicted, off, strict=True)), (beyond, beyond)])
    return found


def _shape(transport: Transport, length: int, share: int) -> costmodel.Shape:
    """Return the shape of a call by log2 of n * P and of n / k."""
    n = max((1 << length) // transport.size, MIN_LENGTH)
    return costmodel.Shape(n, max(n >> share, 1), transport.size, 4, n, one_node=transport.one_node)


def _short(transport: Transport) -> costmodel.Shape:
    return costmodel.Shape(MIN_LENGTH, SHORT_ENTRIES, transport.size, 4, MIN_LENGTH, one_node=transport.one_node)


def _whole(transport: Transport, tuning: Tuning, name: str, shape: costmodel.Shape, **limits: Any) -> float:
    """Return the seconds of a whole call of one of the choices; limits as for `_call_seconds`."""
    form = formats.Auto(beta=tuning.beta) if tuning.code else formats.Auto()
    channel = Channel(transport, shape.n, form)
    return _call_seconds(channel, costmodel.CHOICES[name](), shape.k, **limits) + _untimed(transport, tuning)


def _call_seconds(
    channel: Channel, algorithm: Algorithm, k: int, turns: int = MAX_TURNS, seconds: float = MAX_SECONDS
) -> float:
    """Return the median seconds, the same on all ranks, of a repeated call: from a barrier to the last return.

    Args:
        turns: most calls that are timed, after two others.
        seconds: after so many, no more than MIN_TURNS calls are timed.
    """
    transport = channel.transport
    vectors = [_uniform(k, channel.length, transport.rank + transport.size * turn) for turn in range(3)]
    times: list[float] = []
    for turn in range(-2, turns):
        x = vectors[turn % 3]
        allgather(transport, np.zeros(1, np.uint8))
        start = transport.now()
        _call(channel, algorithm, x, k)
        took = float(allgather(transport, np.array([transport.now() - start])).max())
        if turn >= 0:
            times.append(took)
        if len(times) >= MIN_TURNS and sum(times) > seconds:
            break
    return float(np.median(times))


def _call(channel: Channel, algorithm: Algorithm, x: SparseVector, k: int) -> SparseVector:
    """Make a call without k as `sparsecoll.allreduce` makes it, after the conversion and validation of its arguments.

    Entries that are sent with the arguments are sent so. Otherwise the arguments are not compared, which takes time of
    its own.
    """
    transport = channel.transport
    channel = channel.with_format(channel.format)
    with CollectiveCall(transport, "tune", transport.timeout) as call:
        call.signature["algo"] = algorithm.describe()
        with transport.phase("select"):
            x._first_not_finite()
            x = channel.roundtrip(x)
        message = algorithm.early(channel, x)
        if message is None or message.size == AGREEMENT_BYTES:
            call.agree()
        else:
            call.agree(x.nnz, message=message)
        channel.gathered = call.gathered
        reduction = algorithm(channel, x, k)
        transport.waitall()
    return reduction.value.to_sparse()


def _lower_quartile(transport: Transport, effort: Effort, call: Callable[[], object]) -> float:
    for _ in range(effort.warm):
        call()
    times = []
    for _ in range(effort.repeats):
        start = transport.now()
        call()
        times.append(transport.now() - start)
    return float(np.percentile(times, 25))


def _together(transport: Transport, effort: Effort, work: Callable[[], object]) -> float:
    """Return the seconds of a work and of an allgather after it, in which every rank waits for all others."""
    row = np.zeros(LATENCY_BYTES, np.uint8)

    def turn() -> None:
        work()
        allgather(transport, row)

    return _lower_quartile(transport, effort, turn) if transport.size > 1 else 0.0


def _ring(transport: Transport, effort: Effort, size: int, count: int = 1) -> float:
    rank, ranks, message = transport.rank, transport.size, np.zeros(size, np.uint8)

    def turn() -> None:
        for _ in range(count):
            transport.isend((rank + 1) % ranks, message)
        for _ in range(count):
            transport.recv((rank - 1) % ranks)

    return _lower_quartile(transport, effort, turn) if ranks > 1 else 0.0


def _long_ring(transport: Transport, effort: Effort, size: int) -> list[float]:
    """Return the seconds of a message and the processor time of the thread that sends and receives one, per byte."""
    start = time.thread_time()
    took = _ring(transport, effort, size)
    return [took, (time.thread_time() - start) / (effort.warm + effort.repeats) / size]


def _native(transport: Transport, effort: Effort, size: int) -> float:
    """Return the seconds of MPI's own allreduce; infinity where it cannot be used."""
    values = np.zeros(size // 4, np.float32)
    if transport.size == 1 or not transport.allreduce(values, values):
        return math.inf
    effort = replace(effort, warm=1, repeats=effort.repeats if size == effort.native[0] else 3)
    return _lower_quartile(transport, effort, lambda: transport.allreduce(values, values))


def _kernels(transport: Transport, effort: Effort) -> list[float]:
    """Return the seconds to merge entries, to encode and decode them, and to process dense values.

    What a call takes however few they are is not in these: it is told by a second call, with fewer of them.
    """
    if transport.virtual:
        return [0.0] * 3
    few = replace(effort, entries=effort.entries // FEW, values=effort.values // FEW)
    both = zip(_kernel_calls(transport, effort), _kernel_calls(transport, few), strict=True)
    return [max(took - short, took / 4) * FEW / (FEW - 1) for took, short in both]


def _kernel_calls(transport: Transport, effort: Effort) -> list[float]:
    x, wide = _uniform(effort.entries, 100 * effort.entries), _uniform(effort.values // 16, effort.values)
    form = formats.FORMATS["packed"]
    parts = [x.take(np.arange(start, x.nnz, costmodel.PARTS)) for start in range(costmodel.PARTS)]

    def dense() -> SparseVector:
        total = DenseVector.marked(wide)
        return total.add(total, total.dtype, in_place=True)._stored()

    return [
        _lower_quartile(transport, effort, lambda: SparseVector.merge(parts, x.dtype)),
        _lower_quartile(transport, effort, lambda: formats.decode(form.encode(x), x.length)),
        _lower_quartile(transport, effort, dense),
    ]


def _uniform(entries: int, length: int, seed: int = 0) -> SparseVector:
    """Return a vector with nearly `entries` (at most so many) uniform indices."""
    rng = np.random.default_rng(seed)
    indices = np.cumsum(rng.geometric(entries / length, entries)) - 1  # in time for the entries, not for the length
    indices = indices[indices < length]
    return SparseVector(indices, rng.standard_normal(indices.size).astype(np.float32), length)
