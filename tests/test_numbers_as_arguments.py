"""Numbers among the options of methods: what is none of the right kind or range is refused by name."""

import dataclasses
import inspect
import re

import numpy as np
import pytest
import torch

import sparsecoll
from sparsecoll import algorithms, formats, select
from sparsecoll.errors import check_number
from sparsecoll.torch import DistributedOptimizer, compressors

KINDS = (algorithms.Algorithm, formats.Format, select.Selector, compressors.Compressor)
METHODS = {
    made
    for module in (algorithms, formats, select, compressors)
    for made in vars(module).values()
    if isinstance(made, type)
    and issubclass(made, KINDS)
    and dataclasses.is_dataclass(made)
    and not inspect.isabstract(made)
}
NUMBERS = [
    (made, option.name)
    for made in sorted(METHODS, key=lambda made: made.__name__)
    for option in dataclasses.fields(made)
    if option.init and re.match(r"(int|float)\b", str(option.type)) and option.name != "seed"
]


@pytest.mark.parametrize(("made", "name"), NUMBERS, ids=lambda item: getattr(item, "__name__", item))
@pytest.mark.parametrize("wrong", ["x", True, [1.0], float("nan")], ids=repr)
def test_what_is_no_number_is_refused_by_name(made, name, wrong):
    own = [f for f in dataclasses.fields(made) if f.init]
    needed = {f.name: 1 for f in own if f.default is f.default_factory is dataclasses.MISSING}
    with pytest.raises((TypeError, ValueError), match=f"^{name}(, selector)?: expected"):
        made(**{**needed, name: wrong})


@pytest.mark.parametrize("name", ["qsgd", "powersgd", "randomk"])
def test_a_seed_is_an_integer_on_all_ranks(name):
    def program(comm):
        model = torch.nn.Linear(64, 64)
        own = compressors.COMPRESSORS[name](seed="x", **{"density": 0.1} if name == "randomk" else {})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises((TypeError, ValueError), match="seed: expected an integer"):
            optimizer = DistributedOptimizer(optimizer, model, comm, own)
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()

    sparsecoll.simulate(2, program)


def test_numbers_of_any_library_are_taken():
    for half in (0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5)):
        assert check_number("x", half, "(0, 1]") == 0.5
    for value, interval in ((1, "[0, 1)"), (0, "(0, 1]"), (float("inf"), "[0, inf)")):
        with pytest.raises(ValueError, match=r"x: expected in"):
            check_number("x", value, interval)
