"""Options of a user's own classes are dataclass fields, which ranks compare; others are refused on all ranks."""

from dataclasses import dataclass

import numpy as np
import pytest

import sparsecoll
from sparsecoll import CommunicationError, RowSparse, SparseVector, simulate
from sparsecoll.algorithms.rows import RowGather
from sparsecoll.formats import FORMATS, Coo


class Rows:
    """A RowAlgorithm."""

    argument, base = "algo", RowGather

    @staticmethod
    def use(comm, algorithm):
        return sparsecoll.allreduce(comm, RowSparse([comm.rank], np.ones((1, 2), np.float32), 5), algorithm).nnz


class Wire:
    """A Format, which receivers know."""

    argument, base = "format", Coo

    @staticmethod
    def use(comm, form):
        return sparsecoll.allreduce(comm, SparseVector([comm.rank], np.ones(1), 5), "allgather", format=form).nnz


class Means:
    """A Compressor."""

    argument = "compressor"

    @property
    def base(self):
        pytest.importorskip("torch")
        from sparsecoll.torch.compressors import NoCompression

        return NoCompression

    @staticmethod
    def use(comm, compressor):
        import torch

        model = torch.nn.Linear(2, 3)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        sparsecoll.torch.DistributedOptimizer(inner, model, comm, compressor).close()
        return 2


KINDS = [Rows(), Wire(), Means()]


@pytest.fixture(params=KINDS, ids=lambda kind: type(kind).__name__)
def kind(request, monkeypatch):
    base = request.param.base
    monkeypatch.setitem(FORMATS, "own", dataclass(frozen=True)(type("Own", (Coo,), {"id": 101, "name": "own"}))())
    return request.param, base if base is not Coo else type(FORMATS["own"])


def with_init(base):
    class WithInit(base):
        name = "own"

        def __init__(self, share):
            object.__setattr__(self, "share", share)

    return WithInit(0.5)


def annotated(base):
    class Annotated(base):
        name = "own"
        share: float = 0.5

    return Annotated()


def nameless(base):
    return type("Nameless", (base,), {"name": None})()


FAULTS = [
    (with_init, "a dataclass, whose options are its fields, got WithInit with an __init__ of its own: add @dataclass"),
    (annotated, "a dataclass, whose options are its fields, got Annotated, which is none, with share: add @dataclass"),
    (nameless, "a class with a string `name`, got Nameless with None: add name = '...' to it"),
]


@pytest.mark.parametrize(("fault", "text"), FAULTS)
def test_options_that_no_rank_compares_are_refused_on_all_ranks(kind, fault, text):
    (tested, base), sound = kind, kind[1]()

    def program(comm):
        with pytest.raises(TypeError, match=f"rank 1: {tested.argument}: expected {text}"):
            tested.use(comm, fault(base) if comm.rank == 1 else sound)
        return tested.use(comm, sound)

    assert simulate(2, program).results == [2, 2]


def test_fields_are_compared(kind):
    (tested, base), frozen = kind, kind[0].argument == "format"

    @dataclass(frozen=frozen)
    class Fields(base):
        name = "own"
        share: float = 0.5

    def program(comm):
        with pytest.raises(CommunicationError, match=r"share"):
            tested.use(comm, Fields(0.5 + comm.rank))
        return tested.use(comm, Fields(0.25))

    assert simulate(2, program).results == [2, 2]


def test_a_subclass_without_options_needs_no_decorator(kind):
    tested, base = kind
    own = type("Without", (base,), {"name": "own", "known": 3})
    assert simulate(2, lambda comm: tested.use(comm, own())).results == [2, 2]
