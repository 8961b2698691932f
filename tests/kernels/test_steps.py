"""Steps of an optimizer: the fast kernel equals the reference bit for bit, which takes the steps of torch.optim.SGD."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from test_kernels import FEW, equal, indices, seeds, sizes, values

from sparsecoll.kernels import cpu, reference, threads
from sparsecoll.kernels.keys import SgdRule

RULES = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.1, 1.0, 0.0]),
        "share": st.sampled_from([1 / 3, -0.25]),
        "decay": st.sampled_from([0.0, 0.01]),
        "momentum": st.sampled_from([0.9, 0.1]),
        "damp": st.sampled_from([1.0, 0.7]),
        "nesterov": st.booleans(),
    }
)


@FEW
@given(st.sampled_from(["f", "d"]), sizes, seeds, st.sampled_from([np.uint32, np.uint64]), RULES, st.data())
def test_steps_have_the_bits_of_the_reference(dtype, size, seed, own, rule, data):
    dtype, i, offset = np.dtype(dtype), indices(size, seed, own), data.draw(st.sampled_from([0, 1, 7]))
    length = (int(i[-1]) + 1 if i.size else 0) + data.draw(st.sampled_from([0, 1, cpu.steps.PART]))
    i, v = i + own(offset), values(dtype, i.size, seed)
    params = values(dtype, length, seed + 1)
    velocity = values(dtype, length, seed + 2) if data.draw(st.booleans()) else None
    mine, theirs = [[None if x is None else x.copy() for x in (params, velocity)] for _ in range(2)]
    cpu.sgd_step(*mine, i, v, offset, SgdRule(**rule))
    reference.sgd_step(*theirs, i, v, offset, SgdRule(**rule))
    for a, b in zip(mine, theirs, strict=True):
        if b is not None:
            np.testing.assert_array_equal(a, b)
            if not np.isnan(b).any():
                equal(a, b)


def test_threads_share_a_step(monkeypatch):
    monkeypatch.setattr(threads, "allowed", lambda: 3)
    monkeypatch.setattr(threads, "SHARED", 1)
    rng = np.random.default_rng(0)
    params, velocity = rng.standard_normal((2, 5 * cpu.steps.PART + 3))
    i, v = np.sort(rng.choice(params.size, 400, replace=False)).astype(np.uint32), rng.standard_normal(400)
    rule = {"lr": 0.1, "share": 0.5, "decay": 0.1, "momentum": 0.9, "damp": 0.8, "nesterov": True}
    mine, theirs = (params.copy(), velocity.copy()), (params, velocity)
    cpu.sgd_step(*mine, i, v, 0, SgdRule(**rule))
    reference.sgd_step(*theirs, i, v, 0, SgdRule(**rule))
    for a, b in zip(mine, theirs, strict=True):
        equal(a, b)


MOMENTA = [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.3}]


@pytest.mark.parametrize("settings", MOMENTA, ids=str)
@pytest.mark.parametrize("weight_decay", [0, 0.1])
def test_steps_are_those_of_torch(settings, weight_decay):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    p = torch.nn.Parameter(torch.from_numpy(rng.standard_normal(100)))
    optimizer = torch.optim.SGD([p], 0.1, weight_decay=weight_decay, **settings)
    mine, velocity = p.detach().numpy().copy(), np.zeros(100) if "momentum" in settings else None
    for step in range(3):
        i, v = np.sort(rng.choice(100, 20, replace=False)).astype(np.uint32), rng.standard_normal(20)
        p.grad = torch.zeros(100, dtype=torch.float64)
        p.grad[torch.from_numpy(i.astype(np.int64))] = torch.from_numpy(v / 4)
        optimizer.step()
        damp = 1 - settings.get("dampening", 0) if step else 1.0
        momentum, nesterov = settings.get("momentum", 0), settings.get("nesterov", False)
        rule = {"lr": 0.1, "share": 1 / 4, "decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        cpu.sgd_step(mine, velocity, i, v, 0, SgdRule(damp=damp, **rule))
        np.testing.assert_allclose(mine, p.detach().numpy(), rtol=1e-12)
