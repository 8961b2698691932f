"""OneBitAdam: a plain implementation of the same steps, bytes, state and the end of the warm-up."""

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from nets import batch, bits, close, loss_of, net, parameters

from sparsecoll import simulate
from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Codes
from sparsecoll.torch import OneBitAdam, redistribute
from sparsecoll.torch.compressors.onebit import noise_of

WARM_UP, EVERY, BUCKET = 6, 3, 32
OPTIONS = {"warm_up": WARM_UP, "every": EVERY, "bucket": BUCKET}
RATE = 0.01


def one_bit(comm, model, **options):
    return OneBitAdam(model.parameters(), RATE, comm=comm, **{**OPTIONS, **options})


def go_on(comm, model, optimizer, start, stop):
    for step in range(start, stop):
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, step)).backward()
        optimizer.step()


def trained(comm, steps, **options):
    model = net(seed=comm.rank)  # only rank 0's parameters count
    optimizer = one_bit(comm, model, **options)
    go_on(comm, model, optimizer, 0, steps)
    return model, optimizer


def tensors(optimizer):
    """Flat vectors by kind, of the last step."""
    kinds = optimizer.state_dict()["sparsecoll"]["tensors"]
    return {kind: torch.cat([entries[name].flatten() for name in sorted(entries)]) for kind, entries in kinds.items()}


# -- the same in plain torch and NumPy


def rounded(x, bits_, levels, bucket):
    codes = Codes(bits_, levels, bucket)
    message, out = np.empty(codes.size(0, x.size), np.uint8), np.empty_like(x)
    assert codes.encode(x, 0, None, message)
    codes.decode(message, 0, out)
    return out


def mean_in_two_phases(accs, bits_, levels, bucket=BUCKET):
    """The mean of accs, from which what contributes is subtracted; the owner of a region rounds only the sum."""
    P, n = len(accs), accs[0].size
    if P == 1:
        mean, accs[0] = accs[0], np.zeros(n)
        return mean
    buckets = math.ceil(n / bucket)
    edges = [min(buckets * j // P * bucket, n) for j in range(P)] + [n]
    sent = [rounded(acc, bits_, levels, bucket) for acc in accs]
    total = np.empty(n)
    for owner in range(P):
        own = slice(edges[owner], edges[owner + 1])
        for rank in range(P):
            if rank != owner:
                accs[owner][own] += sent[rank][own]
                accs[rank][own] -= sent[rank][own]
        total[own] = accs[owner][own]
    total = rounded(total, bits_, levels, bucket)
    for owner in range(P):
        own = slice(edges[owner], edges[owner + 1])
        accs[owner][own] -= total[own]
    return total / P


class Plain:
    """All ranks in one process, on flat vectors."""

    def __init__(self, P, beta=0.9, other=0.999, eps=1e-8, decay=0.01):
        self.P, self.beta, self.other, self.eps, self.decay = P, beta, other, eps, decay
        self.model = net(seed=0)
        names = [name for name, _ in self.model.named_parameters()]
        sizes = {name: p.numel() for name, p in self.model.named_parameters()}
        edges = np.cumsum([0, *sizes.values()])
        self.parts = [slice(a, b) for a, b in pairwise(edges)]
        self.order = np.concatenate([np.arange(p.start, p.stop) for p in reversed(self.parts)])  # in buckets
        self.shared = np.concatenate([p.detach().numpy().ravel() for p in self.model.parameters()])
        self.own = [self.shared.copy() for _ in range(P)]
        n = self.shared.size
        assert n == sum(sizes[name] for name in names)
        self.m, self.v, self.rest = ([np.zeros(n) for _ in range(P)] for _ in range(3))
        self.momentum = np.zeros(n)

    def gradient(self, rank, values, step):
        flat = torch.from_numpy(values)
        torch.nn.utils.vector_to_parameters(flat.clone(), self.model.parameters())
        self.model.zero_grad()
        loss_of(self.model, batch(rank, step)).backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters()]).numpy()

    def mean(self, bits_, levels):
        accs = [rest[self.order] for rest in self.rest]
        mean = np.empty_like(self.shared)
        mean[self.order] = mean_in_two_phases(accs, bits_, levels)
        for rest, acc in zip(self.rest, accs, strict=True):
            rest[self.order] = acc
        return mean

    def divide(self, squares, gradients):
        root = np.empty_like(self.shared)
        roots = [np.sqrt(square)[self.order] for square in squares]
        root[self.order] = mean_in_two_phases(roots, 8, "float", 512)
        least = np.empty_like(root)
        for start in range(0, root.size, BUCKET):
            least[self.order[start : start + BUCKET]] = np.float32(
                root[self.order[start : start + BUCKET]].sum() / BUCKET
            )
        for part in self.parts:
            root[part] = np.maximum(root[part], 0.1 * np.maximum(least[part], np.float32(root[part].mean())))
        samples = np.array([g[self.order] / root[self.order] for g in gradients]).astype(np.float32).astype(float)
        ratio = (samples**2).sum() / self.P / (samples.mean(axis=0) ** 2).sum()
        self.divisor = root / np.sqrt(np.clip(ratio, 1, self.P)) + self.eps

    def step(self, number):
        if number < WARM_UP:
            return self.local_step(number)
        gradients = [self.gradient(rank, self.shared, number) for rank in range(self.P)]
        for rank, g in enumerate(gradients):
            self.v[rank] = self.other * self.v[rank] + (1 - self.other) * g * g
            self.rest[rank] += self.beta * self.momentum + (1 - self.beta) * g
        self.momentum = self.mean(1, "mean")
        if number in (2 * WARM_UP, 4 * WARM_UP):
            self.divide(self.v, gradients)
        self.shared = self.shared * (1 - RATE * self.decay) - RATE * self.momentum / self.divisor

    def local_step(self, number):
        t = number + 1
        gradients = [self.gradient(rank, self.own[rank], number) for rank in range(self.P)]
        for rank, g in enumerate(gradients):
            self.m[rank] = self.beta * self.m[rank] + (1 - self.beta) * g
            self.v[rank] = self.other * self.v[rank] + (1 - self.other) * g * g
            first, second = self.m[rank] / (1 - self.beta**t), self.v[rank] / (1 - self.other**t)
            self.own[rank] = self.own[rank] * (1 - RATE * self.decay) - RATE * first / (np.sqrt(second) + self.eps)
        if t % EVERY:
            return
        for rank in range(self.P):
            self.rest[rank] += self.shared - self.own[rank]
        self.shared = self.shared - self.mean(4, "linear")
        self.own = [self.shared.copy() for _ in range(self.P)]
        if t == WARM_UP:
            self.v = [v / (1 - self.other**t) for v in self.v]
            self.divide(self.v, gradients)
            for rank in range(self.P):
                first = self.m[rank] / (1 - self.beta**t)
                self.rest[rank] = self.rest[rank] * self.divisor / RATE + self.beta * first


@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_steps_are_those_of_a_plain_implementation_and_ranks_have_the_same_bits(P):
    plain, steps = Plain(P), 4 * WARM_UP + 2
    for step in range(steps):
        plain.step(step)

    def program(comm):
        model, optimizer = trained(comm, WARM_UP, verify=1)
        assert not optimizer.warming_up
        seen = []
        for step in range(WARM_UP, steps):
            go_on(comm, model, optimizer, step, step + 1)
            seen.append(bits(model))
        return seen, torch.cat([p.detach().flatten() for p in model.parameters()])

    results = simulate(P, program).results
    assert all(seen == results[0][0] for seen, _ in results)
    torch.testing.assert_close(results[0][1], torch.from_numpy(plain.shared), rtol=1e-9, atol=1e-12)


def test_the_warm_up_of_one_rank_is_adamw_bit_for_bit():
    def program(comm):
        model, other = net(), net()
        plain = torch.optim.AdamW(other.parameters(), RATE)
        go_on(comm, model, one_bit(comm, model, every=1, bits=8), 0, WARM_UP)
        go_on(comm, other, plain, 0, WARM_UP)
        close(parameters(model), parameters(other), 1e-14, 1e-14)

    simulate(1, program)


def test_nothing_is_lost_in_steps_and_at_the_end_of_the_warm_up():
    """A mean over the ranks of what waits, and of what moves."""

    def mean(comm, t):
        return sum(torch.from_numpy(part) for part in comm.allgather(t.numpy())) / comm.size

    def program(comm):
        _, longer = trained(comm, WARM_UP, warm_up=WARM_UP + EVERY)
        waits = tensors(longer)["residual"]
        first = longer.optimizer.state_dict()["state"]
        names = [name for name, _ in net().named_parameters()]
        own = {names[i]: s["exp_avg"] / (1 - 0.9 ** float(s["step"])) for i, s in first.items()}
        moments = torch.cat([own[name].flatten() for name in sorted(own)])
        model, optimizer = trained(comm, WARM_UP)
        now = tensors(optimizer)
        assert not now["momentum"].any()
        expected = mean(comm, waits) * now["divisor"] / RATE + 0.9 * mean(comm, moments)
        close([mean(comm, now["residual"])], [expected])
        for step in range(WARM_UP, WARM_UP + 8):
            before = now
            model.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            now = tensors(optimizer)
            g = torch.cat([grads[name].flatten() for name in sorted(grads)])
            entered = mean(comm, before["residual"]) + 0.9 * before["momentum"] + 0.1 * mean(comm, g)
            close([mean(comm, now["residual"]) + now["momentum"]], [entered])

    simulate(3, program)


@pytest.mark.parametrize("P", [2, 3])
def test_bytes_are_those_of_the_formula(P):
    """The scale of a bucket has 4 bytes."""
    n = sum(p.numel() for p in net().parameters())

    def program(comm):
        model = net()
        optimizer = one_bit(comm, model)
        received = []
        for step in range(2 * WARM_UP + 2):
            before = optimizer.traffic.copy()
            go_on(comm, model, optimizer, step, step + 1)
            phases = optimizer.traffic.since(before).phases
            sums = [phases[name] for name in ("split", "gather") if name in phases]
            received.append(sum(c.bytes_received for c in sums))
        return received

    def size(b):
        return 2 * (P - 1) * (math.ceil(n / (512 if b == 8 else BUCKET)) * 4 + math.ceil(n * b / 8))

    total = np.sum(simulate(P, program).results, axis=0).tolist()
    for step, found in enumerate(total):
        means = (step + 1) % EVERY == 0 if step < WARM_UP else True
        b = [4] if step < WARM_UP and means else [1] if means else []
        b += [8] if step in (WARM_UP - 1, 2 * WARM_UP) else []
        assert found == sum(map(size, b)), (step, found, b)


# -- saved state


@pytest.mark.parametrize("stop", [WARM_UP - 1, WARM_UP, WARM_UP + 1, 2 * WARM_UP])
def test_a_run_resumes_with_the_same_bits_before_and_after_the_warm_up(stop):
    steps = 2 * WARM_UP + 3

    def program(comm):
        model, optimizer = trained(comm, stop)
        saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        go_on(comm, model, optimizer, stop, steps)
        again, other = trained(comm, 2)  # other parameters, moments and residuals
        again.load_state_dict(weights)
        other.load_state_dict(saved)
        go_on(comm, again, other, stop, steps)
        return bits(model), bits(again), saved

    results = simulate(3, program).results
    assert len({pair[0] for pair in results}) == 1 and all(a == b for a, b, _ in results)
    states = [saved for *_, saved in results]

    def of_two(comm):
        model, optimizer = trained(comm, 0)
        optimizer.load_state_dict(redistribute(copy.deepcopy(states), comm.rank, 2))
        go_on(comm, model, optimizer, stop, steps)
        return bits(model)

    assert len(set(simulate(2, of_two).results)) == 1


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    def program(comm):
        model, optimizer = trained(comm, WARM_UP - EVERY)
        early = copy.deepcopy(optimizer.state_dict())
        go_on(comm, model, optimizer, WARM_UP - EVERY, WARM_UP + 2)
        late = copy.deepcopy(optimizer.state_dict())
        again, other = trained(comm, 1)
        with pytest.raises(ValueError, match=r"expected one from after the warm-up.*make a new OneBitAdam"):
            optimizer.load_state_dict(early)
        new, plain = trained(comm, 0)
        plain.load_state_dict(torch.optim.AdamW(new.parameters(), RATE).state_dict())
        for own in (optimizer, other):  # what get_optimizer_state_dict leaves of `late`
            with pytest.raises(ValueError, match="expected moments, got none: torch's functions lose those"):
                own.load_state_dict({key: late[key] for key in ("state", "param_groups")})
        with pytest.raises(CommunicationError, match="state of the warm-up"):
            other.load_state_dict(late if comm.rank else early)
        with pytest.raises(CommunicationError, match="load the file that this rank saved"):
            other.load_state_dict({**late, "sparsecoll": {**late["sparsecoll"], "rank": 0}})
        assert other.warming_up
        go_on(comm, again, other, 1, EVERY)
        go_on(comm, model, optimizer, WARM_UP + 2, WARM_UP + 4)
        return bits(model), bits(again)

    assert len(set(simulate(2, program).results)) == 1


def test_a_plain_adamw_goes_on_from_the_state_with_new_moments():
    def program(comm):
        model, optimizer = trained(comm, WARM_UP + 2)
        plain = torch.optim.AdamW(model.parameters())
        plain.load_state_dict(optimizer.state_dict())
        assert plain.param_groups[0]["lr"] == RATE
        go_on(comm, model, plain, 0, 1)

    simulate(2, program)


@pytest.mark.parametrize("signal", [0.0, 0.5, 10.0])
def test_the_estimate_of_the_noise_is_that_of_independent_noise(signal):
    P, n = 4, 100_000

    def program(comm):
        draw = [torch.Generator().manual_seed(seed) for seed in (9, comm.rank)]
        size = torch.rand(n, generator=draw[0]) + 0.5
        common = signal * torch.randn(n, generator=draw[0]) * size
        gradient = common + torch.randn(n, generator=draw[1]) * size
        size[::7], gradient[::7] = 0.0, 0.0  # of parameters without gradients
        return noise_of(comm.transport, gradient, size)

    results = simulate(P, program).results
    assert len(set(results)) == 1
    assert results[0] == pytest.approx(math.sqrt((signal**2 + 1) / (signal**2 + 1 / P)), rel=0.05)


def test_a_scale_lengthens_the_steps_after_the_warm_up():
    def program(comm, scale):
        model, optimizer = trained(comm, WARM_UP, scale=scale)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        before = parameters(model)
        go_on(comm, model, optimizer, WARM_UP, WARM_UP + 1)
        return [p - b for p, b in zip(parameters(model), before, strict=True)]

    (once, *_), (twice, *_) = (simulate(2, lambda comm, s=s: program(comm, s)).results for s in (1.0, 2.0))
    assert sum(float(t.norm()) for t in twice) == pytest.approx(2 * sum(float(t.norm()) for t in once), rel=0.2)


def test_maximizing_the_negated_loss_is_the_same():
    def program(comm, sign):
        model = net(seed=0)
        groups = [{"params": [*model.parameters()], "maximize": sign < 0}]
        optimizer = OneBitAdam(groups, RATE, comm=comm, model=model, **OPTIONS)
        for step in range(5 * WARM_UP):
            optimizer.zero_grad()
            (sign * loss_of(model, batch(comm.rank, step))).backward()
            optimizer.step()
        return parameters(model)

    least, most = (simulate(2, lambda comm, sign=sign: program(comm, sign)).results[0] for sign in (1, -1))
    close(least, most)


def test_all_new_ranks_get_the_mean_of_the_second_moments():
    states = simulate(2, lambda comm: copy.deepcopy(trained(comm, WARM_UP)[1].state_dict())).results
    squares = [state["sparsecoll"]["tensors"]["square"] for state in states]
    for rank in range(5):
        new = redistribute(states, rank, 5)["sparsecoll"]["tensors"]["square"]
        for name in squares[0]:
            close([new[name]], [(squares[0][name] + squares[1][name]) / 2], rtol=1e-6)
            assert new[name].any()


def test_fewer_ranks_get_a_divisor_for_noisier_means():
    states = simulate(4, lambda comm: copy.deepcopy(trained(comm, 2 * WARM_UP)[1].state_dict())).results
    old, fewer, more = (
        state["sparsecoll"]["tensors"]["divisor"]
        for state in (states[0], redistribute(states, 0, 2), redistribute(states, 0, 8))
    )
    for name, divisor in old.items():
        close([fewer[name]], [divisor * 2**0.5], rtol=1e-6)
        assert torch.equal(more[name], divisor)
