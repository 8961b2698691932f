"""Classes of a user's own: their contract is checked by sparsecoll.testing, and what they raise reaches all ranks."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import sparsecoll
from sparsecoll import CommunicationError, Reduction, RowGather, RowSparse, SparseVector, simulate, testing
from sparsecoll.formats import FORMATS, CooFormat, Format
from sparsecoll.select import Selector, TopK, checked

DOCS = Path(__file__).parent.parent / "docs"
PAGES = "".join((DOCS / name).read_text() for name in ("architecture.md", "tutorial_methods.md"))


def of_page(name):
    """The class of that name on the pages about classes of one's own."""
    block = next(
        block for block in re.findall(r"^```python\n(.*?)^```", PAGES, re.S | re.M) if f"class {name}(" in block
    )
    names = {"__name__": "block"}
    exec(compile(block, "block", "exec"), names)
    return names[name]


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("Ring", testing.check_algorithm),
        ("Sign", testing.check_format),
        ("AboveMean", testing.check_selector),
        ("Signs", testing.check_compressor),
    ],
)
def test_classes_of_the_pages_keep_the_contract(name, check, monkeypatch):
    for known in list(FORMATS):
        monkeypatch.setitem(FORMATS, known, FORMATS[known])
    if name == "Signs":
        pytest.importorskip("torch")
    own = of_page(name)()
    FORMATS.pop("sign", None)
    check(own)


class InNumPy(Selector):
    name = "in_numpy"

    def select(self, x, k):
        values = x.to_dense()
        magnitudes = np.abs(values).astype(np.float64)
        chosen = magnitudes >= 12 * magnitudes.sum() / max(values.size, 1)
        return checked(SparseVector.from_dense(np.where(chosen, values, 0)).topk(k))


def test_a_selector_may_work_on_arrays():
    testing.check_selector(dataclass(InNumPy)())


@pytest.mark.parametrize("result", [None, SparseVector([0], [1.0], 4), (1, 2)], ids=repr)
def test_an_algorithm_that_returns_no_reduction_is_told_so(result):
    @dataclass
    class Wrong(Own):
        def __call__(self, channel, x, k):
            return result

    got = type(result).__name__
    text = rf"algo: expected 'own' to return Reduction\(value, contributed\), got {got}"
    for P in (1, 3):
        with pytest.raises(TypeError, match=text):
            simulate(P, lambda comm: sparsecoll.allreduce(comm, SparseVector([comm.rank], [1.0], 4), Wrong()))


def gather(channel, x):
    with channel.phase("gather"):
        return channel.merge(channel.allgather(x))


class Own(sparsecoll.Algorithm):
    name = "own"
    semantics = "exact_sum"
    sends_sums = False
    takes_ops = True

    def __call__(self, channel, x, k):
        return Reduction(gather(channel, x), x)


class Unknown(Own):
    semantics = "exact"


class Nameless(Own):
    name = None


class Annotated(Own):
    share: float = 0.5


class WithInit(Own):
    def __init__(self, share=1):
        super().__init__()
        self.share = share


class Narrow(Own):
    def __call__(self, channel, x, k):
        return Reduction(gather(channel, x).astype(np.float32), x)


class OnlyOwn(Own):
    def __call__(self, channel, x, k):
        return Reduction(x, x)


class Forgetful(Own):
    def __call__(self, channel, x, k):
        return Reduction(gather(channel, x), x.slice_entries(0, x.nnz // 2))


class Cutting(Own):
    def __call__(self, channel, x, k):
        total = gather(channel, x)
        return Reduction(total.slice_entries(0, total.nnz - 1), x)


class Leftwards(Own):
    """Passes vectors round a ring, but to rank -1 from rank 0."""

    def __call__(self, channel, x, k):
        channel.isend(channel.rank - 1, x)
        return Reduction(channel.merge([x, channel.recv((channel.rank + 1) % channel.size)]), x)


class Racing(Own):
    """Adds the vectors in the order in which the ranks have begun."""

    def __call__(self, channel, x, k):
        begun = vars(channel.transport._world).setdefault("begun", [])  # all ranks have it
        begun.append(channel.rank)
        end = begun.count(channel.rank) * channel.size
        parts = channel.allgather(x)
        return Reduction(channel.merge([parts[rank] for rank in begun[end - channel.size : end]]), x)


@pytest.mark.parametrize(
    ("algo", "kind", "text"),
    [
        (Unknown, ValueError, "expected `semantics` to be one of .*, got 'exact'"),
        (Nameless, TypeError, "expected a class with a string `name`, got Nameless: add name"),
        (Annotated, TypeError, "expected a dataclass, whose options are its fields, got Annotated .* add @dataclass"),
        (WithInit, TypeError, "expected a dataclass, whose options are its fields, got WithInit .* write no __init__"),
        (Narrow, AssertionError, "'random' of float16 on 5 ranks.* expected values .* of float16, got float32"),
        (OnlyOwn, AssertionError, "'random' of float32 on 2 ranks.* expected the same bits on all ranks"),
        (Forgetful, AssertionError, "what contributed does not add up to the result"),
        (Leftwards, AssertionError, "destination: expected a rank from 0 to ., got -1"),
        (Racing, AssertionError, "expected the same bits in every run, whatever the order of messages"),
        (Cutting, AssertionError, "what contributed does not add up|another result than expected"),
    ],
)
def test_what_is_wrong_with_an_algorithm_is_told(algo, kind, text):
    with pytest.raises(kind, match=f"(?s){text}"):
        testing.check_algorithm(algo())
    testing.check_algorithm(Own())


@dataclass(frozen=True)
class Wire(Format):
    """Coo with another id."""

    id = 77
    name = "wire"

    def plan(self, x, wire):
        return FORMATS["coo"].plan(x, wire)

    def decode(self, buffer, length):
        message = buffer.copy()
        if message.size and message[0] == self.id:
            message[0] = CooFormat.id
        return sparsecoll.formats.decode(message, length)


class Longer(Wire):
    def decode(self, buffer, length):
        y = super().decode(buffer, length)
        return SparseVector(y.indices, y.values, 10 * length)


class Dropping(Wire):
    def decode(self, buffer, length):
        y = super().decode(buffer, length)
        return y.slice_entries(0, y.nnz // 2)


class Trusting(Wire):
    def decode(self, buffer, length):
        _, index, nnz = self.read_header(buffer, length)
        indices = buffer[16 : 16 + index.itemsize * nnz].view(index)
        return SparseVector.from_sorted_unchecked(indices, super().decode(buffer, length).values, length)


class WithoutId(Wire):
    id = 0


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Longer, "expected length and dtypes of x"),
        (Dropping, "1 entries of .*Mismatch|shapes"),
        (Trusting, "Error"),
        (WithoutId, "expected an id from 1 to 255, got 0"),
    ],
)
def test_what_is_wrong_with_a_format_is_told(form, text):
    with pytest.raises(AssertionError, match=f"(?s){text}"):
        testing.check_format(form())
    testing.check_format(Wire())


@dataclass
class Choosing(Selector):
    name = "choosing"

    def select(self, x, k):
        return x.topk(k)


class Scaled(Choosing):
    def select(self, x, k):
        return 2 * x.topk(k)


class Wider(Choosing):
    def select(self, x, k):
        return x.topk(k).astype(np.float64)


class Arrays(Choosing):
    def select(self, x, k):
        return x.topk(k).values


class Stateless(Choosing):
    def __init__(self):
        self.calls = 0

    def select(self, x, k):
        self.calls += 1
        return x.topk(k + self.calls)


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        (Scaled, "other entries than those of x"),
        (Wider, "300 of 20,000 values of float16, .* expected entries of float16, got float64"),
        (Arrays, "expected a SparseVector of length 20000"),
        (Stateless, "state that is saved and loaded: .* other choices"),
    ],
)
def test_what_is_wrong_with_a_selector_is_told(selector, text):
    with pytest.raises(AssertionError, match=f"(?s){text}"):
        testing.check_selector(selector())
    testing.check_selector(Choosing())


def use_rows(comm, algorithm):
    return sparsecoll.allreduce(comm, RowSparse([comm.rank], np.ones((1, 2), np.float32), 5), algorithm).nnz


def use_format(comm, form):
    return sparsecoll.allreduce(comm, SparseVector([comm.rank], np.ones(1), 5), "allgather", format=form).nnz


@pytest.mark.parametrize(("base", "use"), [(RowGather, use_rows), (Wire, use_format)])
def test_options_that_are_fields_are_compared(base, use, monkeypatch):
    monkeypatch.setitem(FORMATS, "wire", Wire())

    @dataclass(frozen=base is Wire)
    class Fields(base):
        share: float = 0.5

    def program(comm):
        with pytest.raises(CommunicationError, match="share"):
            use(comm, Fields(share=0.5 + comm.rank))
        return use(comm, Fields(share=0.25))

    assert simulate(2, program).results == [2, 2]


@dataclass
class Failing(TopK):
    """A selector of the user's that fails on one rank."""

    name = "failing"

    def select(self, x, k):
        raise KeyError("own")


def test_an_exception_of_an_own_class_on_one_rank_is_raised_on_all():
    def program(comm):
        algo = sparsecoll.Allgather(selector=Failing() if comm.rank == 1 else TopK())
        with pytest.raises(CommunicationError, match="rank 1 failed: KeyError: 'own'"):
            sparsecoll.allreduce(comm, np.arange(9.0), algo, k=2, check=False)
        return sparsecoll.allreduce(comm, np.arange(9.0), "allgather", k=2).nnz

    assert simulate(3, program).results == [2] * 3
