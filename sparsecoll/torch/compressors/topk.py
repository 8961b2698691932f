"""Top-k with any allreduce algorithm, with error feedback."""

from __future__ import annotations

import copy
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch

from sparsecoll.algorithms import Algorithm, Hierarchical, Reduction, SparDL, as_algorithm
from sparsecoll.errors import check_number
from sparsecoll.formats import Format
from sparsecoll.kernels.keys import Momentum
from sparsecoll.select import RandomK, Selector, Vector
from sparsecoll.select.base import built_in, check_selector
from sparsecoll.torch.compressors.base import Compressor, ErrorFeedback, StepContext, entries_of, write_mean
from sparsecoll.torch.compressors.schedule import ENTRIES, Density, as_row_density, as_schedule, is_rare
from sparsecoll.torch.compressors.versions import Versioned
from sparsecoll.torch.tensors.layout import CPU, Array, Layout
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector


def shorter(momentum: float) -> float:
    """Return the momentum that takes the place of SGD's, since waiting in the residual acts like momentum, too."""
    return max(0.0, 1 - 3 * (1 - momentum))


@dataclass
class TopKCompressor(ErrorFeedback):
    """Each rank sends about the k largest entries of residual + gradient (Stich, Cordonnier, Jaggi, NeurIPS 2018).

    1. acc = residual + gradient, of which about k entries are selected, in one pass over memory.
    2. A sparse allreduce sums them.
    3. residual = acc - the entries that entered the sum.

    With `momentum`, momentum is corrected (Deep Gradient Compression, section 3.1): u = momentum * u + gradient
    replaces the gradient, and u is cleared where an entry that this rank sent entered the sum (factor masking, section
    3.3; not with an algorithm that sends all values, such as "dense"). Without the correction, momentum acts on
    gradients only when they leave the residual, which is too late. Use an optimizer without momentum: parameters that
    are too small to be compressed get the same momentum and clipping. Parameters with sparse gradients (rows) are only
    clipped; rank 0 warns if the optimizer does not apply a momentum to them either. With `momentum=None`, keep the
    learning rate and the momentum of torch.optim.SGD: see `sparsecoll.torch.SparseSGD`.

    Volume: that of the algorithm (see docs/algorithms.md). Memory: the residual, and u with momentum.

    Args:
        density: k as a fraction of a bucket, in (0, 1] or a Schedule (default: 0.01).
        algo: name in `sparsecoll.ALGORITHMS`, or an Algorithm object, of which each bucket gets a copy (default:
            "auto").
        selector: the selector of `sparsecoll.select`; None, the default, for the algorithm's own selection, or exact
            top-k if it has none. It must be None with an algorithm that sends all values, and one without selector.
        format: wire format, a name or a Format (default: "auto").
        value_dtype: dtype of the values on the wire, "float16", "bfloat16" or "float32"; None, the default, for that of
            the gradients. Residuals keep the rounding error; rows that are sent without a residual lose it.
        momentum: factor of the momentum correction, in [0, 1) (default: 0, none). None takes the place of the momentum
            of SparseSGD, or of the torch.optim.SGD that DistributedOptimizer wraps: of m, it makes Nesterov momentum of
            1 - 3 (1 - m), or 0.
        nesterov: Nesterov momentum: u = momentum * (u + gradient), and u + gradient replaces the gradient (default:
            False).
        clip: norm N; the gradients of a rank are clipped to a norm of N / sqrt(P) (section 3.2). None, the default, for
            no clipping.
        clip_by: "parameter" (the default) clips each parameter by its own norm; "bucket" clips by the norm of all
            parameters of a bucket: as published, of the whole gradient, with `bucket_bytes=None, dense_below=0`. A
            parameter with sparse gradients is a bucket of its own.
        row_density: for sparse gradients, as of torch.nn.Embedding(sparse=True): the rows of largest Euclidean norm
            that each rank sends, as a fraction of the rows of the table, with error feedback, whose residual stores
            rows only. None, the default, sends all rows, without a residual.

    Raises:
        ValueError: An option is out of range, or the algorithm cannot use the selector.
    """

    name = "topk"

    density: Density = 0.01
    algo: str | Algorithm = "auto"
    selector: Selector | None = None
    _: KW_ONLY
    format: str | Format = "auto"
    value_dtype: str | None = None
    momentum: float | None = 0.0
    nesterov: bool = False
    clip: float | None = None
    clip_by: str = "parameter"
    row_density: Density | None = None

    def __post_init__(self) -> None:
        schedule, algorithm = as_schedule(self.density), as_algorithm(self.algo)
        if self.row_density is not None:
            with as_row_density():
                as_schedule(self.row_density)
        check_selector(self.selector)
        if self.selector is not None:
            if algorithm.takes_dense:
                raise ValueError(
                    f"selector: expected None with {algorithm.name}, which sends all values, got {self.selector!r}"
                )
            replace(algorithm, selector=self.selector)  # raises if the algorithm takes none
        if self.momentum is not None:
            check_number("momentum", self.momentum, "[0, 1)")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=True needs momentum > 0")
        if self.clip is not None:
            check_number("clip", self.clip, "(0, inf]")
        if self.clip_by not in ("parameter", "bucket"):
            raise ValueError(f"clip_by: expected 'parameter' or 'bucket', got {self.clip_by!r}")
        self.keeps_zeros = getattr(algorithm, "keeps_zeros", True)
        self.sends_rarely = is_rare(schedule) and not algorithm.takes_dense

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        self._algorithm = copy.deepcopy(as_algorithm(self.algo))
        if self.selector is not None:
            self._algorithm.selector = copy.deepcopy(self.selector)
        selector, select = self._algorithm.selector, type(self._algorithm).select
        once = select is Algorithm.select and (selector is None or built_in(type(selector)))  # a user's may read again
        self._clears = layout.device is CPU and once
        if self.momentum is None and context.momenta is None:
            raise ValueError(
                "momentum: expected a number in a loop that does not know the optimizer's, got None: use momentum=0.7"
                " and SGD without momentum at three times the learning rate, or DistributedOptimizer or SparseSGD"
            )
        self._velocity = self.versions.add(Versioned(layout.zeros(), layout.slices)) if self.momentum != 0 else None

    def for_small(self) -> Compressor | str:
        """Return the exact mean, with the momentum and the clipping of this compressor."""
        if self.momentum == 0 and self.clip is None:
            return super().for_small()
        own = {name: getattr(self, name) for name in ("momentum", "nesterov", "clip", "clip_by")}
        return TopKCompressor(1.0, "dense", **own)

    def for_rows(self) -> dict[str, Any]:
        own = {"density": self.row_density, "value_dtype": self.value_dtype, "clip": self.clip}
        return super().for_rows() | own | {"momentum": self.momentum or 0.0}  # of None, the optimizer's own stays

    def compensate(self, gradient: Array, scale: float = 1.0, source: Array | None = None) -> DenseVector:
        """acc = scale * residual + gradient, formed in the pass that selects."""
        if self.clip is not None:
            if source is not None:
                gradient[:], source = source, None
            self._clip(gradient, self.clip / self.size**0.5)
        self.begin(gradient, source)
        if self._velocity is not None:
            more = self.versions.open
            if more and not self.context.sums_means:
                raise ValueError(
                    "momentum: gradients were reduced twice before a step, in which the compressor's momentum would"
                    " count twice: accumulate within no_sync(), or use overlap=False"
                )
            self._velocity.trial = self.layout.empty()
            self._add_momentum(self._velocity.current, self._velocity.trial, more)
        self.acc.add_later(self._residual.current, scale)
        return self.acc

    def _momenta(self) -> list[float]:
        """Return the factors of the momentum of all parameters in this step."""
        if self.momentum is not None:
            return [self.momentum] * len(self.layout.names)
        assert self.context.momenta is not None
        return [shorter(momentum) for momentum in self.context.momenta(self.layout.names)]

    def _add_momentum(self, velocity: Array, new: Array, more: bool) -> None:
        """Add the velocity to the gradient, if possible in the pass that selects; not to `more` of the gradient."""
        factors, edges = self._momenta(), self.layout.offsets
        nesterov = self.nesterov or self.momentum is None
        if len(set(factors)) == 1 and not more:
            self.acc.momentum_later(Momentum(velocity, factors[0], new, nesterov))
            return
        acc = self.acc.flush().values
        for factor, a, b in zip(factors, edges[:-1], edges[1:], strict=True):
            if more:
                new[a:b] = velocity[a:b] + (factor if nesterov else 1) * acc[a:b]
                acc[a:b] *= 1 + factor * nesterov
                continue
            before = acc[a:b].copy() if nesterov else 0
            new[a:b] = factor * (velocity[a:b] + before) + (acc[a:b] - before)
            acc[a:b] = new[a:b] + before

    def _clip(self, gradient: Array, most: float) -> None:
        whole = [self.layout.device.tensor(gradient)]
        for part in whole if self.clip_by == "bucket" else self.layout.by_name(gradient).values():
            norm = float(torch.linalg.vector_norm(part))
            if norm > most:
                part.mul_(most / norm)

    def reset(self) -> None:
        self._algorithm.reset()

    def compress(self, acc: Vector) -> Vector:
        if self._algorithm.takes_dense:
            return self._whole()
        self._algorithm.sync_epoch(self.epoch)
        self._k = entries_of(self.density, self.layout.length, self.context.step)
        if self._passes_by():
            self.check_finite(acc)
        return self._selected(acc)

    def _passes_by(self) -> bool:
        """Return whether NaN and infinity may be left unselected; a threshold of the library selects them first."""
        inner, selector = self._algorithm, self._algorithm.selector
        while type(inner) is Hierarchical:  # which selects as the algorithm between nodes
            inner = inner._between
            selector = selector or inner.selector
        known = built_in(type(inner))
        if selector is None:  # SparDL shares k among blocks
            return not known or (isinstance(inner, SparDL) and self._k < self.size)
        return not known or isinstance(selector, RandomK) or not built_in(type(selector))

    def _selected(self, acc: Vector) -> Vector:
        """Return what this rank sends, of as many entries as were counted."""
        self.acc.clear_selected = self._clears
        try:
            chosen = self._algorithm.select(acc, self._k, self.size)
        finally:
            self.acc.clear_selected = False
        # entries selected in the call, perhaps by another rank alone, might leave a NaN behind
        return self._whole() if chosen is acc else chosen

    def _whole(self) -> DenseVector:
        """Return all of acc, if it is finite."""
        acc = self.acc.flush()
        self.check_finite(acc)
        return acc

    def communicate(self, transport: Transport, message: Vector) -> Reduction:
        options: dict[str, Any] = {} if self._algorithm.takes_dense else {"k": self._k, "compared": {ENTRIES: self._k}}
        return self.reduce(
            transport, message, self._algorithm, format=self.format, value_dtype=self.value_dtype, **options
        )

    def update(self, out: Array, message: Any, reduced: Reduction) -> None:
        self.acc.form()
        if reduced.parts is not None and out.dtype == self.acc.dtype and out.dtype.char in "fd":
            DenseVector(out).copy_sum(reduced.parts, self.size)
        else:
            write_mean(out, reduced.value, self.size)
        self._subtract_sent(message, reduced)  # last: entries of a selector of the user's may share acc's memory

    def _subtract_sent(self, message: Vector, reduced: Reduction) -> None:
        """What this rank has contributed leaves its state."""
        self.contributed(reduced.contributed)
        self._mask(message, reduced.contributed)

    def contributed(self, sent: Vector) -> None:
        """Subtract what contributed from acc.

        The pass that selects also clears the entries, which are in the cache then, as long as exactly these contribute,
        as in exact sums without rounding. After the first reduction in which others do, they are subtracted.
        """
        self._clears = self._clears and self.acc.has_removed(sent)
        super().contributed(sent)

    def _mask(self, sent: Vector, contributed: Vector) -> None:
        """Clear u at the entries of `sent` that entered the sum; `contributed` may have other indices, too."""
        if self._velocity is None or self._algorithm.takes_dense or self._k == self.layout.length:
            return  # all values are sent in every step
        velocity = self._velocity.trial
        assert velocity is not None
        if isinstance(contributed, DenseVector):
            velocity[contributed.values != 0] = 0
        elif isinstance(sent, DenseVector):
            velocity[contributed.indices] = 0
        else:
            all_of_it = sent.indices is contributed.indices
            velocity[(sent if all_of_it else sent.intersect(contributed)).indices] = 0

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        own = {} if self._velocity is None else {"velocity": self.layout.by_name(self._velocity.base)}
        return super().state() | own

    def extra_state(self) -> dict[str, Any]:
        return {"algorithm": self._algorithm.state_dict()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._algorithm.load_state_dict(state["algorithm"])
