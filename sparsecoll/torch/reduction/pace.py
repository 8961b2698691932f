"""When LocalOptimizer takes means, of which parameters, and those that are being formed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from sparsecoll.errors import check_integer, check_number
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.reduction.bucket import Bucket
from sparsecoll.torch.reduction.state import without_numpy
from sparsecoll.torch.replica.calls import Outcome
from sparsecoll.torch.tensors.model import Named


@dataclass
class Pace:
    """When means are taken, and of what; see the arguments of LocalOptimizer.

    Args:
        parts: the fragments' modules or lists of parameters; or their number; None for one.

    Raises:
        ValueError, TypeError: An argument is invalid.
    """

    every: int
    parts: int | Sequence[Any] | None = None
    delay: int = 0
    alpha: float = 0.0
    weight: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        parts = 1 if self.parts is None else self.parts
        check_integer("every", self.every, 1)
        if not isinstance(parts, Sequence):
            check_integer("fragments", parts, 1)
        self.fragments = len(parts) if isinstance(parts, Sequence) else int(parts)
        if not 1 <= self.fragments <= self.every:
            raise ValueError(f"fragments: expected 1 to every={self.every} of them, got {self.fragments}")
        check_integer("delay", self.delay, 0)
        if self.delay >= self.every:
            raise ValueError(f"delay: expected fewer steps than every={self.every}, got {self.delay}")
        if check_number("alpha", self.alpha, "[0, 1)") and not self.delay:
            raise ValueError(f"alpha: expected 0 without a delay, got {self.alpha}")
        if self.weight is not None and not callable(self.weight):
            raise TypeError(f"weight: expected a function, got {type(self.weight).__name__}")
        self.known: dict[int, int] = {}  # the fragments that were given, by id of a parameter
        for i, part in enumerate(parts if isinstance(parts, Sequence) else ()):
            for p in part.parameters() if isinstance(part, torch.nn.Module) else part:
                if not torch.is_tensor(p):
                    raise TypeError(f"fragments: expected modules or lists of parameters, got {type(p).__name__}")
                if self.known.setdefault(id(p), i) != i:
                    raise ValueError(
                        f"fragments: expected every parameter in one, got one of shape {tuple(p.shape)} in"
                        f" {self.known[id(p)]} and {i}"
                    )

    @property
    def under_way(self) -> int:
        """Means that are still being formed when the next one begins."""
        return max(0, -(-self.delay * self.fragments // self.every) - 1)

    def fragment(self, number: int) -> int | None:
        """Return which fragment has the mean with this number; None for all parameters."""
        return None if self.fragments == 1 else number % self.fragments

    def steps_before(self, number: int) -> int:
        """Return the steps from one mean to the one with this number."""
        at = number % self.fragments
        return (at + 1) * self.every // self.fragments - at * self.every // self.fragments

    def place(self, params: Named, fragments: Mapping[str, int], added: Named) -> dict[str, int]:
        """Return the fragments of added parameters: those given, or the smallest one then, for the largest first."""
        sizes = [0] * self.fragments
        for name, fragment in fragments.items():
            sizes[fragment] += params[name].nbytes
        placed: dict[str, int] = {}
        for name, p in sorted(added.items(), key=lambda pair: (id(pair[1]) not in self.known, -pair[1].nbytes)):
            placed[name] = self.known.get(id(p), sizes.index(min(sizes)))
            sizes[placed[name]] += p.nbytes
        return {name: placed[name] for name in added}


@dataclass(frozen=True)
class Mean:
    """A mean that is being formed, on trial.

    Attributes:
        number: of the mean.
        fragment: of the parameters; None for all.
        buckets: that hold them.
        flags: of this rank.
        steps: taken before by this rank since the mean before.
        due: number of steps of this rank, from its first one on, after which it takes the mean.
        delayed: whether it takes steps meanwhile.
        result: what the ranks have told each other.
    """

    number: int
    fragment: int | None
    buckets: list[tuple[Bucket, Compressor]]
    flags: int
    steps: int
    due: int
    delayed: bool
    result: Future[Outcome]


class Outer(torch.optim.SGD):
    """The optimizer of the shared parameters, unless the user gives another."""

    momentum_of = "LocalOptimizer", "outer_momentum"


class OuterOptimizers:
    """The optimizers that move the values of the last mean; each of their groups has the copies of its parameters."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self._group_of = {id(p): i for i, group in enumerate(self.groups) for p in group["params"]}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Their groups; those of a loaded state are others."""
        return [group for own in self.optimizers for group in own.param_groups]

    @property
    def dicts(self) -> list[dict[Any, Any]]:
        """Everything that `use` changes."""
        return [*(own.state for own in self.optimizers), *self.groups]

    def use(self, params: Named, shared: Named) -> None:
        """Let the groups have the copies of their parameters; those of others join the last group."""
        last, copies = len(self.groups) - 1, set(map(id, shared.values()))
        for i, group in enumerate(self.groups):
            group["params"] = [shared[n] for n, p in params.items() if self._group_of.get(id(p), last) == i]
        for own in self.optimizers:
            for copy in [t for t in own.state if id(t) not in copies]:
                del own.state[copy]

    @property
    def keeps_nothing_in_common(self) -> bool:
        """Whether steps of some parameters each are the same as one of all, as with torch's own optimizers."""
        return all(type(own) is Outer or type(own).__module__.startswith("torch.optim.") for own in self.optimizers)

    def rate(self, copies: Iterable[torch.Tensor]) -> float | None:
        """Return the learning rate if a step adds -rate * gradient to these copies, and has no other effect."""
        wanted, rates = set(map(id, copies)), set()
        for own in self.optimizers:
            for group in own.param_groups:
                if not wanted.isdisjoint(map(id, group["params"])):
                    plain = type(own) is Outer and not (group["momentum"] or group["weight_decay"] or group["maximize"])
                    rates.add(float(group["lr"]) if plain else None)
        return rates.pop() if len(rates) == 1 else None

    def state_dict(self) -> Any:
        """Return the state, that of one optimizer or a list."""
        without_numpy(self.groups)
        states = [own.state_dict() for own in self.optimizers]
        return states[0] if len(states) == 1 else states

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` has returned; None: begin anew."""
        states = state if isinstance(state, list) else [state] * (1 if state else len(self.optimizers))
        if len(states) != len(self.optimizers):
            raise ValueError(f"state_dict: expected {len(self.optimizers)} outer optimizers, got {len(states)}")
        for own, one in zip(self.optimizers, states, strict=True):
            own.load_state_dict(one or {**own.state_dict(), "state": {}})
