"""Every format: round trip, exact size beforehand, stated rounding, and no damage from damaged messages."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from sparsecoll import CommunicationError, DenseVector, Residual, SparseVector, allreduce, formats, simulate
from sparsecoll.formats import FORMATS
from sparsecoll.testing.formats import WIDE, check_format, check_message
from sparsecoll.vector import VALUE_DTYPES
from sparsecoll.vector.values import dtype_of

FEW = settings(max_examples=80, deadline=None)
LOSSLESS = [name for name, form in FORMATS.items() if not form.lossy]
names = st.sampled_from(LOSSLESS)


@st.composite
def vectors(draw, largest=2**40):
    dtype = np.dtype(draw(st.sampled_from([name for name in VALUE_DTYPES if name != "bfloat16"])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    span = min(largest, draw(st.sampled_from([1, 7, 64, 1000, 20_000, largest])))
    start = draw(st.integers(0, largest - span))
    nnz = draw(st.one_of(st.integers(0, min(span, 300)), st.just(min(span, 3000))))
    indices = start + np.unique(rng.integers(0, span, nnz) if span > 10**6 else rng.choice(span, nnz, replace=False))
    nnz = indices.size
    values = rng.integers(1, 2**10, nnz) * rng.choice([-1, 1], nnz)  # zeros among them, as int8
    values = values / 8 if dtype.kind in "fc" else values
    length = draw(st.integers(start + span, largest + span))
    return SparseVector(indices, values.astype(dtype), length)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_keeps_the_contract(name):
    check_format(FORMATS[name])


@FEW
@given(names, vectors())
def test_round_trip_and_size(name, x):
    assume(name not in ("dense", "bitmap") or not x.nnz or int(x.indices[-1] - x.indices[0]) < WIDE)
    check_message(FORMATS[name], x)


@FEW
@given(names, vectors(largest=10**5), st.sampled_from(["float16", "bfloat16"]))
def test_narrow_values_are_what_rounded_says(name, x, value_dtype):
    if x.dtype.kind != "f":
        return
    check_message(FORMATS[name], x, value_dtype)
    expected = formats.rounded(x, value_dtype)
    error = np.abs(expected.values.astype(np.float64) - x.values.astype(np.float64))
    assert (error <= np.abs(x.values.astype(np.float64)) * (2**-11 if value_dtype == "float16" else 2**-8)).all()


@pytest.mark.parametrize("name", ["coo", "packed", "bitmap", "auto"])
@pytest.mark.parametrize("step", [1, 2, 9, 1000])
def test_sparse_or_dense_takes_fewer_bytes(name, step):
    x, sparse, dense = (
        SparseVector(np.arange(0, 5000, step), np.ones(-(-5000 // step)), 5000),
        FORMATS[name],
        FORMATS["dense"],
    )
    either = sparse.sparse_or(dense)
    message = either.encode(x)
    assert message.size == either.size(x) == min(sparse.sparse().size(x), dense.size(x))
    np.testing.assert_array_equal(formats.decode(message, 5000).indices, x.indices)


def test_formats_left_out_of_auto_are_left_out_by_algorithms():
    """They ask for a format without or with zeros."""
    x, coo, bitmap = SparseVector(np.arange(0, 5000, 3), np.ones(1667), 5000), FORMATS["coo"], FORMATS["bitmap"]
    only, both = formats.AutoFormat(choose=("coo",)), formats.AutoFormat(choose=("bitmap", "dense"))
    assert only.sparse().size(x) == only.sparse_or(FORMATS["dense"]).size(x) == coo.size(x)
    assert both.sparse().size(x) == both.sparse_or(FORMATS["dense"]).size(x) == bitmap.size(x)
    full = DenseVector(np.ones(5000)).to_sparse()
    assert both.sparse_or(FORMATS["dense"]).size(full) == FORMATS["dense"].size(full)


def test_rounding_to_nearest_even_saturation_and_special_values():
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 70000, -70000, np.inf, -np.inf, np.nan], np.float32)
    x = SparseVector(np.arange(values.size), values, 100)
    bf16 = formats.rounded(x, "bfloat16").values
    np.testing.assert_array_equal(bf16[:2], np.array([1, 1 + 2**-6], np.float32))
    assert np.isfinite(bf16[2]) and (bf16[5:7] == [np.inf, -np.inf]).all() and np.isnan(bf16[7])
    half = formats.rounded(x, "float16").values
    np.testing.assert_array_equal(half[2:7], np.array([65504, 65504, -65504, np.inf, -np.inf], np.float32))


def runs(*lengths, apart=1000):
    """A vector whose entries stand in runs of these lengths, of a dtype whose exponents are not coded."""
    indices = np.concatenate([number * apart + np.arange(length) for number, length in enumerate(lengths)])
    return SparseVector(indices, np.ones(indices.size), 10**6)


@pytest.mark.parametrize(
    ("best", "x"),
    {
        "dense": runs(500),
        "densestream": runs(*[900] * 50),
        "packed": SparseVector(np.arange(0, 10**6, 100), np.ones(10**4, np.float32), 10**6),
        "bitmap": SparseVector(np.arange(0, 10**6, 2), np.ones(5 * 10**5), 10**6),
        "coo": SparseVector([7, 10**5], np.ones(2, np.float32), 10**6),
    }.items(),
)
def test_auto_takes_the_smallest_one(best, x):
    sizes = {name: FORMATS[name].size(x) for name in LOSSLESS if name != "auto"}
    assert min(sizes, key=sizes.get) == best
    assert formats.encode(x).tobytes() == formats.encode(x, best).tobytes()
    assert FORMATS["auto"].size(x) == sizes[best]


def test_auto_plans_two_formats_for_a_message_of_few_entries(monkeypatch):
    planned = []
    for name in LOSSLESS:
        kind, plan = type(FORMATS[name]), type(FORMATS[name]).plan
        if name != "auto":
            monkeypatch.setattr(kind, "plan", lambda *a, n=name, p=plan: planned.append(n) or p(*a))
    for x in (SparseVector([], np.ones(0, np.float32), 9), runs(32), runs(*[1] * 32)):
        size = min(FORMATS[name].size(x) for name in ("coo", "packed"))
        planned.clear()
        assert formats.encode(x).size == size and set(planned) == {"coo", "packed"}
        assert formats.AutoFormat(choose=("bitmap",)).size(x) == FORMATS["bitmap"].size(x)
    planned.clear()
    formats.encode(runs(33))
    assert set(planned) == {"coo", "dense", "packed", "densestream"}  # a bitmap would surely be larger


def test_auto_on_a_fast_link_does_not_pay_for_coding():
    x = SparseVector(np.arange(0, 10**6, 100), np.ones(10**4, np.float32), 10**6)
    for beta, best in ((8e-9, "packed"), (1e-11, "coo")):  # 1 Gb/s; 800 Gb/s
        assert formats.encode(x, formats.AutoFormat(beta=beta)).tobytes() == formats.encode(x, best).tobytes()


def test_formats_are_found_by_name_and_as_objects():
    assert formats.as_format("coo") is FORMATS["coo"]
    assert formats.as_format(formats.SlotsFormat(m=5)).m == 5
    with pytest.raises(ValueError, match=r"expected one of coo, .*, got 'zip'"):
        formats.as_format("zip")
    with pytest.raises(TypeError, match="expected a name or a Format, got int"):
        formats.as_format(3)


@dataclass(frozen=True)
class Own(formats.Format):
    """A format of a user's own: coo with another id."""

    id = 77
    name = "own"

    def plan(self, x, wire):
        return FORMATS["coo"].plan(x, wire)

    def decode(self, buffer, length):
        message = buffer.copy()
        message[0] = FORMATS["coo"].id
        return formats.decode(message, length)


class Nameless(Own):
    """A format of a user's own, without an id that a receiver knows."""

    id = None


class SameId(Own):
    """A format of a user's own that receivers take for coo."""

    id = FORMATS["coo"].id


def test_sparse_messages_are_the_smallest_that_are_not_dense():
    rng = np.random.default_rng(0)
    taken = {}
    for density in (0.01, 0.4, 0.99):
        x = SparseVector.from_dense(np.where(rng.random(4000) < density, 1.0, 0.0))
        sizes = {name: FORMATS[name].size(x) for name in ("coo", "packed", "bitmap", "dense")}
        for form, names in (
            (FORMATS["auto"].sparse(), ("coo", "packed", "bitmap")),
            (FORMATS["auto"].sparse_or(FORMATS["dense"]), tuple(sizes)),
        ):
            assert form.encode(x).size == min(sizes[name] for name in names)
        taken[density] = min(sizes, key=sizes.get)
    assert list(taken.values()) == ["packed", "bitmap", "dense"]


@pytest.mark.parametrize("form", [Own(), Nameless(), SameId()])
def test_formats_that_receivers_do_not_know_are_refused(form):
    x = SparseVector([1, 5], np.array([1.0, 2.0]), 9)

    def program(comm):
        with pytest.raises(TypeError, match=r"rank 1: format: expected an object of a class in FORMATS.*needs an id"):
            allreduce(comm, x, "allgather", format=form if comm.rank == 1 else "coo")
        return allreduce(comm, x, "allgather", format="coo").values.tolist()

    assert simulate(3, program).results == [[3.0, 6.0]] * 3


def test_a_format_of_ones_own_in_formats(monkeypatch):
    monkeypatch.setitem(FORMATS, "own", Own())
    x = SparseVector([1, 5], np.array([1.0, 2.0]), 9)
    for form in ("own", Own()):
        y = simulate(3, lambda comm, f=form: allreduce(comm, x, "allgather", format=f)).results[2]
        assert y.values.tolist() == [3.0, 6.0]
    monkeypatch.setitem(FORMATS, "own", SameId())
    with pytest.raises(TypeError, match="an id that no other has"):
        formats.as_format("own")


@dataclass(frozen=True)
class Half(Own):
    """A lossy format of a user's own: the entries at even positions, with their values truncated, to integers."""

    id = 78
    name = "half"
    lossy = True

    def plan(self, x, wire):
        plan = FORMATS["coo"].plan(x.take(np.arange(0, x.nnz, 2)).with_values(np.trunc(x.values[::2])), wire)

        def write(buffer):
            plan.write(buffer)
            buffer[8:16].view(np.uint64)[0] = (x.nnz + 1) // 2

        return formats.Encoding(plan.size, write)


@pytest.mark.parametrize("value_dtype", [None, "float16"])
def test_what_a_lossy_format_of_ones_own_loses_does_not_count_as_contributed(monkeypatch, value_dtype):
    monkeypatch.setitem(FORMATS, "half", Half())
    x = SparseVector([1, 3, 5], np.array([1.5, 2.5, 3.5], np.float32), 9)
    y = Half().roundtrip(x, value_dtype)
    assert (y.indices.tolist(), y.values.tolist(), y.dtype) == ([1, 5], [1.0, 3.0], x.dtype)


def test_a_residual_keeps_what_a_lossy_format_of_ones_own_loses(monkeypatch):
    monkeypatch.setitem(FORMATS, "sign", Sign())

    def program(comm):
        residual, given, total = Residual(50), np.zeros(50), np.zeros(50)
        for step in range(5):
            gradient = np.random.default_rng((comm.rank, step)).integers(-8, 8, 50).astype(np.float32)
            given += gradient
            acc = residual.compensate(gradient)
            reduction = allreduce(comm, acc, "allgather", k=20, format="sign", return_reduction=True)
            residual.update(reduction.contributed)
            total += reduction.value.to_dense()
        return given, total, residual.array

    results = simulate(3, program).results
    assert results[0][1].any()
    np.testing.assert_array_equal(sum(r[0] for r in results), results[0][1] + sum(r[2] for r in results))


@dataclass(frozen=True)
class Sign(Own):
    """A lossy format of a user's own: the sign of each entry, times the largest magnitude."""

    id = 79
    name = "sign"
    lossy = True

    def plan(self, x, wire):
        return FORMATS["coo"].plan(x.with_values(np.sign(x.values) * np.abs(x.values).max(initial=0)), wire)


@pytest.mark.parametrize("name", [*LOSSLESS, "slots"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_complex_messages_are_not_added_into_real_vectors(name, dtype):
    x = SparseVector([1, 5], np.array([1.0, 2.0j], np.complex64), 9)
    dense = DenseVector(np.zeros(9, dtype_of(dtype)))
    with pytest.raises(
        CommunicationError, match=f"message: expected values that can be added to {dtype}, got complex64"
    ):
        formats.add_into(dense, [formats.encode(x, name)])
    assert not dense.values.astype(float).any()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*LOSSLESS[:-1], "slots", "packed_codes"]), vectors(largest=10**5), st.data())
def test_damaged_messages_raise_and_never_give_an_invalid_vector(name, x, data):
    assume(name != "packed_codes" or x.dtype in (np.float32, np.float64))
    buffer = formats.encode(x, name)
    kind = data.draw(st.sampled_from(["cut", "grown", "flipped", "other length"]))
    length = x.length
    if kind == "cut":
        buffer = buffer[: data.draw(st.integers(0, buffer.size - 1))]
    elif kind == "grown":
        buffer = np.concatenate([buffer, np.zeros(data.draw(st.integers(1, 20)), np.uint8)])
    elif kind == "flipped":
        for _ in range(data.draw(st.integers(1, 4))):
            offset = data.draw(st.integers(0, min(buffer.size, 60) - 1) | st.integers(0, buffer.size - 1))
            buffer[offset] ^= np.uint8(data.draw(st.integers(1, 255)))
    else:
        length = data.draw(st.integers(0, x.length))
    try:
        y = formats.decode(buffer.copy(), length)
    except CommunicationError:
        return
    SparseVector(y.indices, y.values, length)  # whatever comes through is a valid vector of that length
    assert kind != "cut" or name == "dense"


def test_a_dense_message_that_has_lost_values_is_refused():
    x = SparseVector([3, 4, 9], np.ones(3), 20)
    buffer = formats.encode(x, "dense")
    with pytest.raises(CommunicationError, match="expected 3 dense values other than zero, got 2"):
        formats.decode(buffer[:-8], 20)


@FEW
@given(st.lists(st.tuples(st.sampled_from(sorted(FORMATS)), vectors(largest=10**4)), max_size=5))
def test_messages_of_any_format_are_added_into_a_dense_vector(parts):
    dense = DenseVector(np.zeros(10**5))
    expected = np.zeros(10**5)
    buffers = []
    for name, x in parts:
        assume(x.dtype.kind != "c" and (not name.endswith("codes") or x.dtype in (np.float32, np.float64)))
        x = SparseVector(x.indices, x.values, 10**5)
        buffers.append(formats.encode(x, name))
        np.add.at(expected, x.indices, FORMATS[name].roundtrip(x).to_dense()[x.indices].astype(float))
    formats.add_into(dense, buffers)
    np.testing.assert_array_equal(dense.values, expected)


def test_messages_at_odd_addresses():
    x = SparseVector([1, 5, 9], np.array([1.0, 2, 3]), 20)
    for name in FORMATS:
        buffer = formats.encode(x, name)
        odd = np.zeros(buffer.size + 1, np.uint8)[1:]
        odd[:] = buffer
        y, expected = formats.decode(odd, 20), FORMATS[name].roundtrip(x)
        assert (y.indices.tolist(), y.values.tolist()) == (expected.indices.tolist(), expected.values.tolist())


@pytest.mark.parametrize("name", FORMATS)
def test_header_that_promises_too_much_allocates_nothing(name):
    x = SparseVector([1], np.ones(1), 4)
    buffer = formats.encode(x, name)
    buffer[8:16] = 255
    with pytest.raises(CommunicationError):
        formats.decode(buffer, 2**62)


def test_registry_is_consistent():
    assert all(name == form.name for name, form in FORMATS.items())
    ids = [form.id for form in FORMATS.values()]
    assert len(ids) == len(set(ids))
    with pytest.raises(CommunicationError, match="no format has the id"):
        formats.decode(np.full(16, 77, np.uint8), 5)
    with pytest.raises(CommunicationError, match="no format has the id"):
        formats.decode(np.empty(0, np.uint8), 5)


def test_damaged_messages_of_nearly_2_to_32_coordinates():
    """A bit, or a first index, beyond the largest one that uint32 holds."""
    x = SparseVector([2**32 - 6, 2**32 - 1], np.ones(2, np.float32), 2**32)
    message = formats.encode(x, "bitmap")
    message[24:32].view(np.uint64)[0] = 1 | 1 << 11
    with pytest.raises(CommunicationError, match="do not fit length"):
        formats.decode(message, 2**32)
    message = formats.encode(SparseVector.empty(2**32, np.float32), "dense")
    message[16:24].view(np.uint64)[0] = 2**32
    with pytest.raises(CommunicationError, match="do not fit length"):
        formats.decode(message, 2**32)


def test_formats_to_choose_from_may_be_a_list():
    x = SparseVector([3, 9], np.ones(2), 20)
    assert formats.decode(formats.encode(x, formats.AutoFormat(beta=8e-9, choose=["coo", "packed"])), 20).nnz == 2
