"""The options that collectives share."""

import inspect
from dataclasses import fields

import numpy as np
import pytest

import sparsecoll
from sparsecoll.collectives.options import CallOptions
from sparsecoll.formats import FORMATS

OWN = {"comm", "x", "algo", "root", "boundaries", "owner", "return_reduction"}


@pytest.mark.parametrize("name", ["allreduce", "reduce", "reduce_scatter", "allgather", "bcast"])
def test_public_functions_take_options_of_this_list_with_these_defaults(name):
    known = {field.name: field.default for field in fields(CallOptions)}
    parameters = inspect.signature(getattr(sparsecoll, name)).parameters
    assert {p: parameters[p].default for p in parameters if p not in OWN}.items() <= known.items()


def test_k_is_given_or_a_share_of_the_length_or_the_algorithms_own():
    assert CallOptions().resolve_k(100) is None and CallOptions().resolve_k(100, 7) == 7
    assert CallOptions(k=np.int64(3)).resolve_k(100, 7) == 3
    assert CallOptions(density=0.02).resolve_k(100, 7) == 2 and CallOptions(density=1e-9).resolve_k(100) == 1
    for density in (np.float16(0.5), np.float32(0.5), np.float64(0.5)):
        assert CallOptions(density=density).resolve_k(10**6) == 500_000
    assert CallOptions(density=np.uint8(1)).resolve_k(10**6) == 10**6


def test_names_and_objects_mean_the_same():
    by_name, by_object = CallOptions(format="coo", value_dtype="float16"), CallOptions(format=FORMATS["coo"])
    assert by_name.wire_format is by_object.wire_format
    assert by_name.signature() == CallOptions(format=FORMATS["coo"], value_dtype=np.float16).signature()


def test_what_sends_sums_takes_no_lossy_format():
    CallOptions(format="slots").check_dtype(np.dtype(np.float32))
    with pytest.raises(ValueError, match="expected one that loses nothing with dense"):
        CallOptions(format="slots").check_dtype(np.dtype(np.float32), "dense")
