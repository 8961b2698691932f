"""Numbers and hashes of words: the fast kernels equal the reference, which is a dict."""

import numpy as np
import pytest

from sparsecoll.kernels import cpu, reference


@pytest.mark.parametrize("words", [[], [b""], [b"", b"a", b""], [b"abc", b"ab", b"abc", b"abd"] * 300])
def test_words_are_numbered_hashed_and_joined_as_by_the_reference(words):
    stops = np.cumsum([len(word) + 1 for word in words], dtype=np.int64) - 1
    starts, text = stops - np.array([*map(len, words)], np.int64), np.frombuffer(b"\xff".join([*words, b""]), np.uint8)
    both = (kernels.number_words(text, starts, stops) for kernels in (cpu, reference))
    for mine, theirs in zip(*both, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype == np.int64
    hashes = [kernels.word_hashes(text, starts, stops) for kernels in (cpu, reference)]
    np.testing.assert_array_equal(*hashes)
    assert len(set(hashes[0].tolist())) == len(set(words)) and hashes[1].dtype == np.uint64
    joined = [kernels.join_words(text, starts[::2], stops[::2]) for kernels in (cpu, reference)]
    assert joined[0].tobytes() == joined[1].tobytes() == b"\0".join([*words[::2], b""])
