"""SparseSGD's acc = residual + learning rate * gradient, in flat vectors: forming, summing, keeping and saving it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sparsecoll.algorithms import as_algorithm
from sparsecoll.errors import NonFiniteError
from sparsecoll.kernels.memory import may_share_memory
from sparsecoll.select import Vector
from sparsecoll.telemetry.trace import span
from sparsecoll.torch.compressors import TopKCompressor
from sparsecoll.torch.reduction.bucket import Bucket
from sparsecoll.torch.reduction.buckets import Buckets
from sparsecoll.torch.reduction.grad_scaler import Scaling
from sparsecoll.torch.reduction.hooks import Owner, is_alike, others_of, take_over
from sparsecoll.torch.reduction.rows import RowSum
from sparsecoll.torch.reduction.state import STATE, check_keys, renamed_state
from sparsecoll.torch.replica.calls import Outcome
from sparsecoll.torch.replica.replica import Replica, changes
from sparsecoll.torch.tensors.layout import Array
from sparsecoll.torch.tensors.model import Named
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.progress import completed_future
from sparsecoll.vector import DenseVector, RowSparse, SparseVector

Sums = list[tuple[Bucket, Vector | RowSparse]]
Group = dict[str, Any]


@dataclass
class SparseSum(TopKCompressor):
    """TopKCompressor that returns the sum as it is, sparse, instead of writing a dense mean."""

    name = "SparseSGD"

    def describe(self) -> str:
        return f"{self.name}({as_algorithm(self.algo).describe()})"

    def allreduce_sum(self, transport: Transport, acc: Array) -> Vector:
        """Return the sum of what all ranks have sent of acc, which holds the residual, if momentum is 0. Collective."""
        with self.reducing(transport):
            with span("select", acc.size):
                if self.momentum is None:  # acc is the gradient
                    self.compensate(acc)
                else:
                    self.begin(acc)
                message = self.message(self.acc)
            reduced = self.communicate(transport, message)
            value = reduced.value
            if may_share_memory(value.values, acc):  # which will change
                value = value.copy() if isinstance(value, SparseVector) else DenseVector(value.values.copy())
            self._subtract_sent(message, reduced)
        return value


class Accumulator(Owner):
    """The parameters that take part, one bucket for each residual dtype and device; residuals of all parameters.

    Attributes:
        names: parameter -> its name, in the order of the groups.
        laid_out: names of the parameters that take part.
        keeps_momentum: whether the compressor has the momentum of the groups.
    """

    def __init__(self, compressor: SparseSum, replica: Replica) -> None:
        self.names: dict[torch.Tensor, str] = {}
        self.laid_out: set[str] = set()
        self._replica, self._buckets = replica, Buckets(compressor, replica)
        replica.compares = partial(is_alike, weakref.ref(self))
        self.keeps_momentum = compressor.momentum is None
        self._others: dict[str, Owner] = {}  # of these parameters, until `take_over`
        self._lost: dict[str, torch.Tensor] = {}  # parameters that another owner steps, too, unless they have left
        self._rated: dict[str, bool] = {}  # whether a residual is in units of learning rate * gradient

    # -- layout

    def differs(self, groups: Iterable[Group]) -> bool:
        """Return whether groups have other parameters, or in another order, than at the last `rename`."""
        return [*dict.fromkeys(id(p) for group in groups for p in group["params"])] != [id(p) for p in self.names]

    def compared(self, names: dict[torch.Tensor, str]) -> tuple[Named, dict[str, Any]]:
        """Return the parameters that are new in `names`, and values to be compared before `rename`."""
        new = {name: p for p, name in names.items() if p not in self.names}
        left = [name for p, name in self.names.items() if p not in names]
        return new, {**changes(new if self.names else (), left), "order of parameters": [*names.values()]}

    def rename(self, names: dict[torch.Tensor, str]) -> None:
        """Set the parameters and their names; what belongs to parameters that are gone is dropped."""
        new, params = self._renamed(names), self._replica.params
        self._buckets.rename(new)
        self._rated = {new[name]: rated for name, rated in self._rated.items() if name in new}
        self.names = names
        params.clear()
        params.update({name: p for p, name in names.items()})
        self._others = others_of(self, params)

    def all_or_none(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """See `Replica.all_or_none`."""
        return self._replica.all_or_none(self.release, vars(self), vars(self._buckets), self._replica.params)

    def take_over(self) -> None:
        """Let no DistributedOptimizer reduce these parameters any more."""
        others, self._others = self._others, {}
        take_over(self, others, self._replica.params)

    def hand_over(self, name: str, p: torch.Tensor, to: Owner) -> None:
        """Record that another owner steps a parameter, if it is no SparseSGD: the next step then raises."""
        if to.replaces and not isinstance(to, Accumulator):
            self._lost[name] = p

    def _renamed(self, names: dict[torch.Tensor, str]) -> dict[str, str]:
        return {old: names[p] for p, old in self.names.items() if p in names}

    def release(self) -> None:
        """Discard all buckets, which the next step creates again; residuals are kept."""
        self._buckets.release()
        self.laid_out = set()

    def move(self) -> None:
        """Discard all buckets and what the ranks of another communicator may not share."""
        self.release()
        self._buckets.share_state("move")

    def fits(self, outcome: Outcome) -> bool:
        """Return whether the buckets are those of the parameters that take part, each with its kind of gradient."""
        return not self._buckets.learn(outcome.rows, outcome.dense) and outcome.trainable == self.laid_out

    def lay_out(self, trainable: set[str]) -> None:
        """Create buckets of these parameters; residuals are kept. Collective."""
        self.laid_out = set()
        self._buckets.order = [name for p, name in self.names.items() if name in trainable and p.numel()]
        self._buckets.all_or_none(lambda _: self._buckets.lay_out())
        self.laid_out = trainable

    # -- a step

    def sums(self, groups: Sequence[Group], scaling: Scaling | None) -> Sums:
        """Return the sum of acc over the ranks for each bucket, and subtract from acc what contributed. Collective."""
        acc = completed_future(lambda: self._accumulate(groups, scaling))  # on the streams and threads of the caller
        if not self._buckets:
            self._replica.call("gradients", lambda _: acc.result())
        sums: Sums = []
        for index, (bucket, compressor) in enumerate(self._buckets):

            def call(_: CollectiveCall, index: int = index, compressor: Any = compressor) -> Any:
                return compressor.allreduce_sum(self._replica.transport, acc.result()[index])

            with bucket.layout.device.stream_context():
                sums.append((bucket, self._replica.call(f"bucket {index}", call)))
        return sums

    def _accumulate(self, groups: Sequence[Group], scaling: Scaling | None) -> list[Any]:
        own = {id(p) for group in groups for p in group["params"]} if self._lost else ()
        self._lost = {name: p for name, p in self._lost.items() if id(p) in own}
        self.replaced = next(iter(self._lost), "")
        self.refuse_replaced("SparseSGD")
        if scaling is not None:
            scaling.begin()
        if scaling is not None and scaling.found:
            raise NonFiniteError("gradients: expected finite values, got NaN or infinity in a scaled gradient")
        weights, acc = self._weights(groups, 1.0 if scaling is None else scaling.scale), []
        for bucket, compressor in self._buckets:
            assert isinstance(compressor, SparseSum | RowSum)
            with bucket.layout.device.stream_context():
                residual: Any = None if compressor.momentum is None else compressor.residual
                if residual is None:
                    self._convert(bucket, compressor, weights)
                acc.append(bucket.accumulate(residual, weights))
        return acc

    def _convert(self, bucket: Bucket, compressor: Any, weights: dict[str, tuple[float, float]]) -> None:
        """Multiply a residual that is not taken into acc, of parameters whose momentum was switched on, by a."""
        for name, part in bucket.layout.by_name(compressor.residual).items():
            if self._rated.get(name):
                part.mul_(weights[name][0])
                self._rated[name] = False

    def _weights(self, groups: Iterable[Group], scale: float) -> dict[str, tuple[float, float]]:
        """Return (a, b) by parameter: acc = a * residual + b * gradient; b is the learning rate if it is `rated`."""
        weights, unrated = dict.fromkeys(self.names.values(), (1.0, 1.0)), self.unrated
        for group in groups:
            lr, rated = float(group["lr"]), self.rated(group)
            for p in filter(self.names.__contains__, group["params"]):  # others come in after this sum
                a, name = 1.0, self.names[p]
                if self._rated.get(name, rated) != rated:  # momentum was switched on or off
                    a = lr if rated else 1 / lr if lr else 1.0
                weights[name] = a, (lr if rated and name not in unrated else 1.0) / scale
        return weights

    @property
    def unrated(self) -> set[str]:
        """The parameters whose rows have no residual, so that they are sent in units of the gradient."""
        return {bucket.layout.names[0] for bucket, c in self._buckets if bucket.layout.rows and not c.keeps_gradient}

    def rated(self, group: Group) -> bool:
        """Return whether residuals of a group are in units of learning rate * gradient."""
        return not (group["momentum"] or self.keeps_momentum)

    def commit(self, groups: Iterable[Group], used: Set[str]) -> set[str]:
        """Accept the step: what remains of acc becomes the residual; see `Buckets.leave_out` for what is returned."""
        left = self._buckets.leave_out(used)
        self._buckets.accept()
        self._buckets.commit()
        rated = {self.names[p]: self.rated(group) for group in groups for p in group["params"]}
        self._rated |= {name: rated[name] for name in self._buckets.index_of.keys() - left}
        return left

    # -- saved state

    def state_dict(self, names: dict[torch.Tensor, str]) -> dict[str, Any]:
        """Return `Buckets.state_dict` under new names, with those of all parameters and the units of residuals."""
        state, new = self._buckets.state_dict(), self._renamed(names)
        rated = {new[name]: rated for name, rated in self._rated.items() if name in new}
        return {**renamed_state(state, new), "params": list(names.values()), "rated": rated}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer, load: Callable[[], Any]
    ) -> None:
        """Load a state as `Buckets.load_state_dict` does, and the optimizer's by `load`; parameters are matched by
        order, not by name. Collective.
        """
        own = self._buckets.load_state_dict(lambda: self._own(state_dict), load, same=[optimizer])
        self.laid_out, self._rated = set(), dict(own.get("rated", {}))

    def _own(self, state_dict: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the library's part of a state_dict under the names used here, or None if it has none."""
        if (own := state_dict.get(STATE)) is None:
            return None
        if "param_groups" not in state_dict or not {"params", "rated"} <= own.keys():
            raise ValueError("state_dict: expected that of SparseSGD or torch.optim.SGD, got another optimizer's")
        check_keys(own)
        if len(own["params"]) != len(here := [*self.names.values()]):
            raise ValueError(f"state_dict: expected {len(here)} parameters, got {len(own['params'])}")
        names = dict(zip(own["params"], here, strict=True))
        return {**renamed_state(own, names), "rated": {names[n]: r for n, r in own["rated"].items()}, "order": []}
