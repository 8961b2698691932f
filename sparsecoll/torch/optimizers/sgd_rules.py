"""The arguments of SparseSGD, their checks, and its steps by a sum that may be sparse; no dense gradient is made."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from sparsecoll import formats
from sparsecoll.algorithms import as_algorithm
from sparsecoll.collectives.options import CallOptions
from sparsecoll.errors import check_flag, check_number
from sparsecoll.formats import Format
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.keys import SgdRule
from sparsecoll.select import Vector
from sparsecoll.torch.compressors.presets import sgdtopk
from sparsecoll.torch.compressors.topk import TopKCompressor, shorter
from sparsecoll.torch.reduction.accumulator import SparseSum
from sparsecoll.torch.tensors.layout import CPU, CpuDevice, Layout, device_of, residual_dtype, rows_like
from sparsecoll.torch.tensors.model import check_whole
from sparsecoll.torch.tensors.private import first_post_hook, untraced
from sparsecoll.vector import DenseVector, RowSparse, SparseVector

logger = logging.getLogger(__name__)

NUMBERS = ("lr", "momentum", "dampening", "weight_decay")
FLAGS = ("nesterov", "maximize")


def compressor_of(
    algo: Any, density: Any, format: str | Format, value_dtype: str | None, row_density: Any
) -> SparseSum:
    """Return the compressor for these arguments of SparseSGD: that of `sgdtopk` if `algo` is None."""
    keeps: dict[str, Any] = {}
    if algo is None and density == 1:
        algo = "dense"
    if algo is None:
        preset = sgdtopk()
        algo, keeps = preset.algo, {"momentum": None}
        format = preset.format if format == "auto" and value_dtype is None else format
        density = preset.density if density is None else density
    density = 0.01 if density is None else density
    formats.as_format(format)
    common = {"format": format, "value_dtype": value_dtype, "row_density": row_density}
    return SparseSum(density, algo=copy.deepcopy(as_algorithm(algo)), **common, **keeps)


def check_group(group: Mapping[str, Any], compressor: SparseSum) -> None:
    """Raise unless the options and parameters of a group are valid."""
    for name in NUMBERS:
        check_number(name, group[name], "[-inf, inf]" if name == "dampening" else "[0, inf]")
    for name in FLAGS:
        check_flag(name, group[name])
    if compressor.momentum is None and not group["momentum"] < 1:
        raise ValueError(f"momentum: expected below 1, got {group['momentum']}")
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError("nesterov=True needs momentum > 0 and dampening=0")
    check_whole(group["params"])
    algorithm = as_algorithm(compressor.algo)
    sums = f"algo={algorithm.name!r}" if algorithm.sends_sums else None
    options = CallOptions(format=compressor.format, value_dtype=compressor.value_dtype)
    for p in group["params"]:
        if p.requires_grad:
            device_of(p)
            options.check_dtype(residual_dtype(p.dtype), sums)


def common(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the options of groups that must be the same on all ranks."""
    return {
        f"param_groups[{i}]": {name: float(group[name]) for name in (*NUMBERS, *FLAGS)}
        | {"number of parameters": len(group["params"])}
        for i, group in enumerate(groups)
    }


def names_of(groups: Iterable[dict[str, Any]], model: torch.nn.Module | None) -> dict[torch.Tensor, str]:
    """Return the parameters of groups with their names: the model's, those in the groups, or their numbers."""
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


class Rule(SgdRule):
    """The options of a step."""

    __slots__ = ()

    @classmethod
    def of(cls, group: dict[str, Any], ranks: int) -> Rule:
        """Return those of a parameter group of torch.optim.SGD."""
        lr, momentum, dampening, decay = (float(group[name]) for name in NUMBERS)
        share = (-1 if group["maximize"] else 1) / ranks
        return cls(lr, share, decay, momentum, 1 - dampening if momentum else 1.0, bool(group["nesterov"]))

    def without_momentum(self, steps: int) -> Rule:
        """Return the options of a step on gradients that have had a shorter momentum before their compression.

        The displacement by a gradient, lr / (1 - momentum) in all, and the weight decay in all are the same, and so is
        the size of the first steps, in which a velocity still grows.

        Args:
            steps: number of steps up to and including this one.
        """
        inside = shorter(self.momentum)
        rate = self.lr * self.damp * (1 - inside) / (1 - self.momentum)
        rate *= (1 - self.momentum**steps) / (1 - inside ** (steps + 1))
        return Rule(rate, self.share, self.decay / (1 - inside), 0.0, 1.0, False)


def check_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless an optimizer's momentum can be replaced by the compressor's."""
    if not isinstance(optimizer, torch.optim.SGD):
        raise ValueError(
            f"compressor: expected one with a momentum of its own, got momentum=None with {type(optimizer).__name__}:"
            " use 'qsgd' with optimizers other than torch.optim.SGD"
        )
    for group in optimizer.param_groups:
        check_number("momentum", group["momentum"], "[0, 1)")


class WithoutMomentum:
    """Groups by which an optimizer steps by `Rule.without_momentum`, except on the parameters `tables()`, by id.

    They take the place of its own groups for its update alone: closures and hooks see the latter, and what its update
    changes in a group is changed there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, tables: Callable[[], set[int]]) -> None:
        self._optimizer, self._steps, self._tables = optimizer, steps, tables
        self._groups: list[dict[str, Any]] | None = None  # the optimizer's own, while others are in their place
        self._pairs: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []  # as made, as used, own one

    def replace(self, *_: Any) -> None:
        """Replace the groups, unless they are replaced."""
        if self._groups is not None:
            return
        self._groups = self._optimizer.param_groups
        self._pairs = [(part, dict(part), own) for own in self._groups for part in self._split(own) if part["params"]]
        self._optimizer.param_groups = [used for _, used, _ in self._pairs]

    def restore(self, *_: Any) -> None:
        """Restore the groups, with what was changed meanwhile."""
        if self._groups is None:
            return
        self._optimizer.param_groups, self._groups = self._groups, None
        for made, used, own in self._pairs:
            own.update({key: value for key, value in used.items() if value is not made.get(key, made)})

    __enter__, __exit__ = replace, restore

    def _split(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        rule, tables = Rule.of(group, 1).without_momentum(self._steps), self._tables()
        own = {"lr": rule.lr, "weight_decay": rule.decay, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
        yield {**group, **own, "params": [p for p in group["params"] if id(p) not in tables]}
        yield {**group, "params": [p for p in group["params"] if id(p) in tables]}

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Call the optimizer's step."""

        def evaluated() -> Any:
            assert closure is not None
            self.restore()
            loss = closure()
            self.replace()
            return loss

        hooks = [first_post_hook(self._optimizer, self.restore)]
        step = self._optimizer.step
        if not inspect.ismethod(step):  # a compiled step keeps the groups with which it was traced
            step = untraced(step)
        try:
            if closure is not None:
                return step(evaluated)
            hooks.append(self._optimizer.register_step_pre_hook(self.replace))  # after those of the user
            return step()
        finally:
            self.restore()
            for hook in hooks:
                hook.remove()


def tell(who: str, groups: Iterable[Mapping[str, Any]], compressor: TopKCompressor) -> None:
    """Log one line that says how the momentum of SGD is applied."""
    if momentum := next((float(group["momentum"]) for group in groups if group["momentum"]), 0.0):
        inside = shorter(momentum)
        algo, form = as_algorithm(compressor.algo).name, formats.as_format(compressor.format).name
        logger.warning(
            f"{who}: Nesterov momentum={inside:.3g} before the compression, at {(1 - inside) / (1 - momentum):.3g}"
            f" times the learning rate, stands for SGD's momentum={momentum:.3g}, since what waits to be sent acts like"
            f" momentum, too. Each rank sends density={compressor.density}, algo={algo!r}, format={form!r}"
        )


class Update:
    """Values to add to a tensor, all of it: a sum over the ranks."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __bool__(self) -> bool:
        """Whether a value is not zero."""
        return bool(self.values.any())

    def add_to(self, tensor: torch.Tensor, factor: float) -> None:
        """tensor += factor * update, in place, in the tensor's dtype, whatever its memory format."""
        tensor.add_(self.values.view(tensor.shape), alpha=factor)

    def _terms(self, dtype: torch.dtype, factor: float) -> tuple[torch.Tensor, float]:
        """Return values of a dtype, which may not hold the sum itself, and what they are still to be multiplied by."""
        return (self.values, factor) if self.values.dtype == dtype else ((self.values * factor).to(dtype), 1.0)

    def step(self, p: torch.Tensor, states: Any, rule: Rule) -> None:
        """Take torch.optim.SGD's step.

        Args:
            states: the state of an optimizer, by parameter.
        """
        if not rule.momentum:
            self._take(p, None, rule)
            return
        state = states[p]
        if (buffer := state.get("momentum_buffer")) is None:
            buffer = state["momentum_buffer"] = torch.zeros_like(p)
            rule = rule._replace(damp=1.0)
        elif buffer.is_sparse:  # gradients have become dense, or have weight decay
            buffer = state["momentum_buffer"] = buffer.to_dense()
        self._take(p, buffer, rule)

    def _take(self, p: torch.Tensor, buffer: torch.Tensor | None, rule: Rule) -> None:
        """Take the step that the kernel takes in one pass."""
        if buffer is not None:
            buffer.mul_(rule.momentum)
            self.add_to(buffer, rule.damp * rule.share)
            if rule.decay:
                buffer.add_(p, alpha=rule.damp * rule.decay)
        if buffer is None or rule.nesterov:
            exact = p.float() if rule.decay and p.itemsize < 4 else p  # a decay below the rounding counts with the sum
            if rule.decay:
                exact.mul_(1 - rule.lr * rule.decay)
            self.add_to(exact, -rule.lr * rule.share)
            if exact is not p:
                p.copy_(exact)
        if buffer is not None:
            p.sub_(buffer, alpha=rule.lr * rule.momentum if rule.nesterov else rule.lr)


class SparseUpdate(Update):
    """Values to add to a tensor at some of its positions.

    Args:
        entries: of a flat vector, in which the tensor begins at `offset`.
        device: of the tensor.
    """

    def __init__(self, entries: SparseVector, offset: int, device: CpuDevice) -> None:
        super().__init__(device.tensor(entries.values))
        self._entries, self._offset, self._device = entries, offset, device

    @functools.cached_property
    def _index(self) -> torch.Tensor:
        """The positions in the flat tensor."""
        return self._device.tensor(self._entries.indices.astype(np.int64) - self._offset)

    def add_to(self, tensor: torch.Tensor, factor: float) -> None:
        index = self._index
        if tensor.is_contiguous():
            values, alpha = self._terms(tensor.dtype, factor)
            tensor.view(-1).index_add_(0, index, values, alpha=alpha)
        elif index.numel():
            positions = torch.unravel_index(index, tensor.shape)
            tensor.index_put_(positions, (self.values * factor).to(tensor.dtype), accumulate=True)

    def _take(self, p: torch.Tensor, buffer: torch.Tensor | None, rule: Rule) -> None:
        changed = [p] if buffer is None else [p, buffer]
        if not all(map(self._is_plain, changed)):
            super()._take(p, buffer, rule)
            return
        params, *velocity = (t.detach().view(-1).numpy() for t in changed)
        entries, moved = self._entries, velocity[0] if velocity else None
        kernels_of(params).sgd_step(params, moved, entries.indices, entries.values, self._offset, rule)
        for t in changed:
            torch.autograd.graph.increment_version(t)  # autograd does not see what is written to arrays

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an array that the kernel takes."""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_contiguous()
        return plain and self._device is CPU and tensor.dtype == self.values.dtype


class RowUpdate(Update):
    """Rows of values to add to a tensor."""

    def __init__(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__(values)
        self._rows = rows

    def add_to(self, tensor: torch.Tensor, factor: float) -> None:
        values, alpha = self._terms(tensor.dtype, factor)
        tensor.index_add_(0, self._rows, values.view(-1, *tensor.shape[1:]), alpha=alpha)

    def step(self, p: torch.Tensor, states: Any, rule: Rule) -> None:
        state = states[p] if rule.momentum else {}
        buffer = state.get("momentum_buffer")
        if not rule.momentum or rule.decay or not (buffer is None or buffer.is_sparse):
            super().step(p, states, rule)
            return
        new = rows_like(p, self._rows, self.values * rule.share)
        buffer = new if buffer is None else buffer.mul_(rule.momentum).add_(new, alpha=rule.damp)
        state["momentum_buffer"] = buffer
        if rule.nesterov:
            p.add_(new, alpha=-rule.lr)
        p.add_(buffer, alpha=-rule.lr * (rule.momentum if rule.nesterov else 1.0))


def updates(layout: Layout, value: Vector | RowSparse) -> Iterator[tuple[str, Update]]:
    """Yield the name and the part of a sum for each parameter of a bucket."""
    device, edges = layout.device, layout.offsets
    if isinstance(value, RowSparse):
        rows, values = CPU.tensor(value.rows), CPU.tensor(value.values)
        yield layout.names[0], RowUpdate(device.to(rows), device.to(values))
    elif isinstance(value, DenseVector):
        flat = device.tensor(value.values)
        for name, a, b in zip(layout.names, edges[:-1], edges[1:], strict=True):
            yield name, Update(flat[a:b])
    else:
        for name, offset, part in zip(layout.names, edges, value.split(edges), strict=False):
            yield name, SparseUpdate(part, offset, device)


def take_step(
    p: torch.Tensor, update: Update, states: Any, group: dict[str, Any], ranks: int, steps: int, rated: bool
) -> None:
    """Take a step on the mean gradient.

    Args:
        update: the sum over the ranks.
        states: the state of an optimizer, by parameter.
        group: the options of torch.optim.SGD.
        steps: number of steps up to this one, if the gradient has had momentum before its compression; otherwise 0.
        rated: whether the sum is in units of the learning rate, unless there is momentum.
    """
    rule = Rule.of(group, ranks)
    if steps and not isinstance(update, RowUpdate):
        rule = rule.without_momentum(steps)
    elif rated and not (steps or rule.momentum):
        rule = rule._replace(lr=1.0, decay=rule.lr * rule.decay)
    update.step(p, states, rule)
