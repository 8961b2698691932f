"""Allgather and dense: their volume and messages are exactly the formulas."""

import pytest
from cases import SUPPORTS
from volume import HEADER_WORDS, measure

from sparsecoll import Allgather, Dense, model


@pytest.mark.parametrize("P", [2, 3, 5, 8, 16, 33])
@pytest.mark.parametrize("name", SUPPORTS)
def test_allgather(name, P):
    k = 2000
    volume = measure(Allgather, name, P, k)
    assert volume.received <= model.allgather_words(k, P) + HEADER_WORDS * P
    assert volume.messages == model.rounds(P)
    if name in ("random", "same", "one_region"):
        assert volume.received >= model.allgather_words(k, P)


@pytest.mark.parametrize("P", [2, 3, 5, 8, 16])
def test_dense(P):
    n = 40_000
    volume = measure(Dense, "random", P, 100, n)
    assert model.dense_words(n, P) <= volume.received + P <= model.dense_words(n, P) + HEADER_WORDS * P
    assert volume.messages == 2 * (P - 1)
