"""All parameters of an optimizer in flat vectors: what is summed over the ranks, what waits, and how it is saved."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from sparsecoll.algorithms import Algorithm, Reduction
from sparsecoll.collectives.allreduce import allreduce_vectors
from sparsecoll.collectives.options import CallOptions
from sparsecoll.errors import NonFiniteError
from sparsecoll.select import Vector
from sparsecoll.torch.device import CpuDevice, device_of
from sparsecoll.torch.flat import FlatVector
from sparsecoll.torch.layout import residual_dtype
from sparsecoll.torch.state import STATE, check
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import allgather

Sums = list[tuple[FlatVector, Vector]]
Group = dict[str, Any]


class Flats:
    """The parameters that want gradients, one flat vector for each residual dtype and device; residuals of all.

    Args:
        algorithm: copied for each vector.
        options: of `sparsecoll.allreduce`.

    Attributes:
        names: parameter -> its name, in the order of the groups.
        laid: names of the parameters that are in flat vectors.
    """

    def __init__(self, algorithm: Algorithm, options: Mapping[str, Any]) -> None:
        self.names: dict[torch.Tensor, str] = {}
        self.laid: set[str] = set()
        self._algorithm, self._options = algorithm, options
        self._vectors: list[FlatVector] = []
        self._parked: dict[torch.Tensor, torch.Tensor] = {}  # residuals of parameters that are in no vector
        self._saved: list[dict[str, Any]] = []  # state of algorithms that waits for vectors to be made
        self._rated: dict[torch.Tensor, bool] = {}  # whether a residual is in units of learning rate * gradient

    def describe(self) -> str:
        """What a saved state is compared by."""
        return f"SparseSGD({self._algorithm.describe()})"

    # -- layout

    @property
    def residuals(self) -> dict[torch.Tensor, torch.Tensor]:
        """Parameter -> its residual, if it has one; not copies."""
        return {p: t for vector in self._vectors for p, t in vector.residuals.items()} | self._parked

    def rename(self, names: dict[torch.Tensor, str]) -> None:
        """These are the parameters now."""
        self.names = names
        self._rated = {p: rated for p, rated in self._rated.items() if p in names}

    def release(self) -> None:
        """Take all vectors apart: they are made anew in the next step, and residuals are kept."""
        self._parked = self.residuals
        self._vectors, self.laid = [], set()

    def lay_out(self, wanted: set[str]) -> None:
        """Make vectors of these parameters; residuals are kept."""
        held, self._parked = self.residuals, {}
        by_kind: dict[tuple[Any, CpuDevice], list[torch.Tensor]] = {}
        for p, name in self.names.items():
            if name in wanted and p.numel():
                by_kind.setdefault((residual_dtype(p.dtype), device_of(p)), []).append(p)
        self._vectors = []
        for (dtype, _), params in by_kind.items():
            vector = FlatVector(params, dtype, copy.deepcopy(self._algorithm))
            for p, residual in vector.residuals.items():
                if p in held:
                    residual.copy_(held.pop(p))
            names = [self.names[p] for p in params]
            for saved in self._saved:
                if saved["params"] == names:
                    vector.algorithm.load_state_dict(saved["state"])
            self._vectors.append(vector)
        self._parked = {p: t.clone() for p, t in held.items() if p in self.names}
        self.laid, self._saved = wanted, []

    # -- a step

    def accumulate(self, groups: Iterable[Group], scale: float) -> None:
        """acc = residual + learning rate * gradient / scale; with momentum, without the learning rate."""
        weights = dict.fromkeys(self.names, (1.0, 1.0))
        for group in groups:
            lr, rated = float(group["lr"]), not group["momentum"]
            for p in group["params"]:
                a = 1.0
                if self._rated.get(p, rated) != rated:  # momentum was switched on or off
                    a = lr if rated else 1 / lr if lr else 1.0
                weights[p] = a, (lr if rated else 1.0) / scale
        for vector in self._vectors:
            with vector.device.stream_context():
                vector.accumulate(weights)

    def sums(self, transport: Transport, problem: Exception | None, timeout: float | None) -> Sums:
        """The sum of acc over the ranks for each vector; what contributed is taken out of acc. Collective.

        Args:
            problem: raised on all ranks.

        Raises:
            NonFiniteError: acc holds NaN or infinity on some rank; the text names the parameter.
        """
        return [(vector, self._sum(vector, transport, problem, timeout)) for vector in self._vectors]

    def _sum(
        self, vector: FlatVector, transport: Transport, problem: Exception | None, timeout: float | None
    ) -> Vector:
        def reduced() -> Reduction:
            with CollectiveCall(transport, "gradients", timeout):
                if problem is not None:
                    raise problem
                if vector.algorithm.selector is not None and vector.not_finite() is not None:  # which may pass NaN by
                    raise NonFiniteError("gradients: expected finite values, got NaN or infinity")
                options = CallOptions(timeout=timeout, **self._options)
                return allreduce_vectors(transport, vector.acc, vector.algorithm, options)

        with vector.device.stream_context():
            try:
                reduction = transport.in_order(reduced)
            except ValueError:
                self._blame(vector, transport, problem, timeout)
                raise
            vector.subtract(reduction.contributed)
        return reduction.value

    def _blame(
        self, vector: FlatVector, transport: Transport, problem: Exception | None, timeout: float | None
    ) -> None:
        """A reduction has failed by its values: raise on all ranks what names the parameter, if one is to blame."""
        bad = vector.not_finite() if problem is None else None
        if bad is not None:
            problem = NonFiniteError(f"gradient of {self.names[bad]!r}: expected finite values, got NaN or infinity")

        def call() -> None:
            with CollectiveCall(transport, "gradients", timeout):
                if problem is not None:
                    raise problem
                allgather(transport, np.zeros(1, np.uint8))
                transport.flush()

        transport.in_order(call)

    def commit(self, sums: Sums, groups: Iterable[Group]) -> None:
        """The step is good: what is left of acc is the residual."""
        rated = {p: not group["momentum"] for group in groups for p in group["params"]}
        for vector, _ in sums:
            vector.commit()
            self._rated |= {p: rated[p] for p in vector.params}

    # -- state

    def state(self) -> dict[str, Any]:
        """Residuals, and their units, by parameter name; thresholds and boundaries by vector."""
        buckets = [
            {"params": [self.names[p] for p in vector.params], "state": vector.algorithm.state_dict()}
            for vector in self._vectors
        ]
        return {
            "compressor": self.describe(),
            "replicated": [],
            "params": list(self.names.values()),
            "rated": {self.names[p]: rated for p, rated in self._rated.items()},
            "tensors": {"residual": {self.names[p]: t.clone() for p, t in self.residuals.items()}},
            "buckets": buckets or self._saved,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `checked` has found to fit."""
        params = {name: p for p, name in self.names.items()}
        self._vectors, self.laid = [], set()
        self._parked = {params[name]: t.clone() for name, t in state["tensors"].get("residual", {}).items()}
        self._rated = {params[name]: rated for name, rated in state["rated"].items()}
        self._saved = list(state["buckets"]) if state["compressor"] == self.describe() else []

    def checked(self, state_dict: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        """The library's part of a state_dict, with the names that parameters have here; empty of plain SGD's.

        Raises:
            CommunicationError: it is another rank's, or of another number of ranks.
            ValueError: it is of other parameters or another optimizer.
        """
        own = state_dict.get(STATE)
        if own is None:
            return {"step": 0, "tensors": {}, "rated": {}, "buckets": [], "compressor": ""}
        if "param_groups" not in state_dict or "rated" not in own:
            raise ValueError(
                "state_dict: expected that of SparseSGD or torch.optim.SGD, got another optimizer's or that of an"
                " earlier version"
            )
        here = list(self.names.values())
        if len(own["params"]) != len(here):
            raise ValueError(f"state_dict: expected {len(here)} parameters, got {len(own['params'])}")
        names = dict(zip(own["params"], here, strict=True))
        own = {
            **own,
            "tensors": {kind: {names[n]: t for n, t in entries.items()} for kind, entries in own["tensors"].items()},
            "rated": {names[n]: rated for n, rated in own["rated"].items()},
            "buckets": [{**bucket, "params": [names[n] for n in bucket["params"]]} for bucket in own["buckets"]],
        }
        check(own, rank, size, {name: p for p, name in self.names.items()}, self.describe())
        return own


def names_of(groups: Iterable[Group], model: torch.nn.Module | None) -> dict[torch.Tensor, str]:
    """Names of the groups' parameters: the model's, those that the groups have, else their numbers."""
    groups = list(groups)
    known: dict[torch.Tensor, str] = {}
    for group in groups:
        known.update(zip(group["params"], group.get("param_names", ()), strict=False))
    if model is not None:
        known |= {p: name for name, p in model.named_parameters()}
    names: dict[str, torch.Tensor] = {}
    for number, p in enumerate(dict.fromkeys(p for group in groups for p in group["params"])):
        name = known.get(p, str(number))
        while name in names:
            name += "'"
        names[name] = p
    return {p: name for name, p in names.items()}
