"""Predicts the times of dense and sparse sums, by the cost model of `auto`, and says which to take."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll.algorithms.auto.costmodel import EXACT, VALUE, Message, Shape, seconds
from sparsecoll.algorithms.primitives.estimates import rounds
from sparsecoll.bench.timing import MPI_ALLREDUCE
from sparsecoll.transport.network import Network

SELECT = 0.43e-9  # seconds per value
SOURCE = f"{SELECT * 1e9:.2f} ns per value, exact top-k that also adds the gradient, docs/kernels.md, fused"
WIDTH = 4  # bytes of a value: float32
HARDLY = 1.1  # times faster, up to which it is not worth the trouble


@dataclass(frozen=True)
class Prediction:
    """One line of the table.

    Attributes:
        method: what forms the sum.
        seconds: of a call, from the dense vector to the sum.
        selecting: seconds of these in which a rank selects its entries.
        bytes: that a rank receives.
    """

    method: str
    seconds: float
    selecting: float
    bytes: float


@dataclass(frozen=True)
class _Volume(Shape):
    """A shape whose seconds are bytes: each byte takes one, and nothing else does. Formats are those of `real`."""

    real: Shape

    def message(self, entries: float, share: float = 1.0) -> Message:
        return Message(self.real.message(entries, share).bytes, 0.0, 0.0)

    def merging(self, entries: float, share: float = 1.0, parts: int = 2) -> float:
        return 0.0


def predict(n: int, density: float, ranks: int, network: Network, one_node: bool = False) -> list[Prediction]:
    """Return predictions of MPI_Allreduce, allgather, oktopk and auto, for values of float32 and uniform supports.

    MPI_Allreduce is taken to be optimal: the better one of recursive doubling and of reduce-scatter with allgather.
    """
    k = max(round(n * density), 1)
    shape = Shape(n, k, ranks, WIDTH, one_node, network)
    times = seconds(shape)
    volumes = seconds(_Volume(n, k, ranks, WIDTH, one_node, Network(0.0, 1.0), shape))
    rest, rises, size = (ranks - 1) / ranks, rounds(ranks), WIDTH * n
    whole = rises * (network.alpha + network.beta * size + VALUE * n)
    parts = 2 * rises * network.alpha + rest * (2 * network.beta * size + VALUE * n)
    moved = rises * size if whole < parts else 2 * rest * size
    found = [Prediction(MPI_ALLREDUCE, min(whole, parts), 0.0, moved)]
    chosen = min(EXACT, key=lambda name: times[name])
    for name, method in (("allgather", "allgather"), ("oktopk", "oktopk"), (chosen, f"auto ({chosen})")):
        selecting = 0.0 if name == "dense" else SELECT * n
        found.append(Prediction(method, times[name] + selecting, selecting, int(volumes[name])))
    return found


def table(found: list[Prediction]) -> str:
    """Return the predictions as text."""
    dense = found[0].seconds
    heads = f"{'method':<24}{'ms':>12}{'selecting':>12}{'MB in':>12}{'x dense':>10}"
    lines = [
        f"{p.method:<24}{1e3 * p.seconds:>12.4g}{1e3 * p.selecting:>12.3g}{p.bytes / 1e6:>12.4g}"
        f"{dense / p.seconds if p.seconds else 1:>10.3g}"
        for p in found
    ]
    return "\n".join([heads, *lines])


def advice(found: list[Prediction]) -> str:
    """Return the advice, as one sentence."""
    dense, best = found[0], min((p for p in found[1:] if p.method != "auto (dense)"), key=lambda p: p.seconds)
    if not dense.seconds:
        return "no: one rank sends nothing."
    faster = dense.seconds / best.seconds
    share = f"selecting takes {100 * best.selecting / best.seconds:.0f} % of that"
    if faster >= HARDLY:
        return f"yes: {best.method} is predicted to be {faster:.1f} times faster than {MPI_ALLREDUCE}; {share}."
    if faster > 1:
        return f"hardly: {best.method} is predicted to be {faster:.2f} times as fast as {MPI_ALLREDUCE}; {share}."
    slower = f"{1 / faster:.1f} times as long as {MPI_ALLREDUCE}"
    return f"no: stay with dense: {best.method}, the fastest sparse sum, is predicted to take {slower}; {share}."
