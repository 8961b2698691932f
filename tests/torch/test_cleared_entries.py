"""Entries that are cleared in the pass that selects them leave the same bits as those that are subtracted later."""

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
from failing import fail_at, unpatch
from one_bucket import step

import sparsecoll
from sparsecoll import Allgather, select, simulate
from sparsecoll.torch.compressors import DRAGONN, StepContext, TopKCompressor, dgc
from sparsecoll.torch.tensors.layout import Layout


@dataclass
class Sometimes(Allgather):
    """In the third call, every second entry of a rank enters the sum, at half of its value."""

    name = "sometimes"
    calls: int = field(default=0, init=False)

    def __call__(self, channel, x, k):
        self.calls += 1
        if self.calls == 3:
            x = x.take(np.arange(0, x.nnz, 2))
            x = x.with_values(x.values * x.dtype.type(0.5))
        return super().__call__(channel, x, k)


@pytest.mark.parametrize(
    ("compressor", "clears"),
    [
        (TopKCompressor(0.02, "allgather"), True),
        (TopKCompressor(0.02, "sparcml"), True),
        (TopKCompressor(0.02, "allgather", value_dtype="float16"), False),
        (TopKCompressor(0.02, Sometimes()), False),
        (TopKCompressor(0.02, "gtopk"), False),
        (TopKCompressor(0.02, "oktopk"), False),
        (TopKCompressor(0.02, "allgather", selector=select.MSTopK()), False),
        (TopKCompressor(1.0, "allgather"), False),
        (TopKCompressor(0.02, "allgather", momentum=0.7, nesterov=True), True),
        (DRAGONN(0.02, selective=False), False),
    ],
    ids=str,
)
def test_entries_that_are_cleared_where_they_are_selected_leave_the_same_bits(compressor, clears):
    """As those that are subtracted after the sum. Some of the values are zeros of both signs, and never sent."""

    def program(comm):
        layout, transport = Layout(0, (20_000,), ("p0",), ((20_000,),), np.dtype(np.float32)), comm.transport
        both = copy.deepcopy(compressor), copy.deepcopy(compressor)
        for own in both:
            own.bind(layout, transport, StepContext())
        both[1]._clears = False
        for number in range(5):
            gradient = np.random.default_rng([comm.rank, number]).standard_normal(20_000).astype(np.float32)
            gradient[::7], gradient[1::7] = 0.0, -0.0
            means = [step(own, transport, gradient.copy()).tobytes() for own in both]
            assert means[0] == means[1]
            for kept, same in zip(*([v.current.tobytes() for v in own.versions.arrays] for own in both), strict=True):
                assert kept == same
        return both[0]._clears

    assert simulate(3, program).results == [clears] * 3


@pytest.mark.parametrize("compressor", [TopKCompressor(0.1, algo="allgather"), dgc(0.1)], ids=str)
def test_entries_cleared_before_a_reduction_failed_are_sent_again(compressor):
    """With the bits of mean and residual that there are without clearing."""

    def program(comm):
        transport, found = comm.transport, []
        layout = Layout(0, (100,), ("a",), ((100,),), np.dtype(np.float64))
        for clears in (True, False):
            own, random = copy.deepcopy(compressor), np.random.default_rng(comm.rank)
            own.bind(layout, transport, StepContext())
            own._clears = clears
            for number in range(4):
                gradient = random.standard_normal(100)
                if number == 2:
                    assert own._clears is clears
                    if comm.rank == 2:
                        fail_at(transport, "isend", 1)
                    with pytest.raises(sparsecoll.CommunicationError, match="rank 2 failed: Fault"):
                        own.allreduce_mean(transport, gradient.copy(), np.empty(100))
                    unpatch(transport, "isend")
                    own.versions.drop()
                found.append((step(own, transport, gradient).tobytes(), own.residual.tobytes()))
        assert found[: len(found) // 2] == found[len(found) // 2 :]

    simulate(3, program)
