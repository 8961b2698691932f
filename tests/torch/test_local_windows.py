"""LocalOptimizer between two means: nothing is lost, whatever is saved, given up, or taken unevenly there."""

import contextlib
import copy
import random

import pytest

torch = pytest.importorskip("torch")

from nets import batch, bits, close, loss_of, net, parameters, residuals  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.errors import CommunicationError, NonFiniteError  # noqa: E402
from sparsecoll.torch import LocalOptimizer, redistribute  # noqa: E402
from sparsecoll.torch.compressors import QSGD, ChunkedTopK, TopKCompressor  # noqa: E402
from sparsecoll.torch.replica.replica import Replica  # noqa: E402

SPARSE = TopKCompressor(0.1, "allgather")
OPTIONS = {"every": 4, "compressor": SPARSE, "dense_below": 0, "bucket_bytes": 6000}


class Run:
    """A rank's model and optimizer, and the sum of what its own steps have changed."""

    def __init__(self, comm, model=None, make=torch.optim.SGD, **options):
        self.comm, self.model, self.count = comm, net(seed=comm.rank) if model is None else model, 0
        self.inner = make(self.model.parameters(), 0.1)
        self.optimizer = LocalOptimizer(self.inner, self.model, comm, **{**OPTIONS, **options})
        self.start = parameters(self.model)
        self.changed = [torch.zeros_like(p) for p in self.start]  # that count
        self.pending = [torch.zeros_like(p) for p in self.start]  # since the last mean
        self.inner.register_step_pre_hook(lambda *_: setattr(self, "before", parameters(self.model)))
        self.inner.register_step_post_hook(lambda *_: self.note())

    def note(self):
        for sum_, old, new in zip(self.pending, self.before, self.model.parameters(), strict=True):
            sum_ += old - new.detach()

    def step(self, count=1):
        for _ in range(count):
            self.optimizer.zero_grad()
            loss_of(self.model, batch(self.comm.rank, self.count)).backward()
            self.count += 1
            self.optimizer.step()
            if not self.optimizer._engine.steps:
                self.settle()

    def settle(self, taken=True):
        for sum_, part in zip(self.changed, self.pending, strict=True):
            sum_ += part * taken
            part.zero_()

    def account(self):
        """What this rank has changed, and its residual; the moves, which are the same on all ranks."""
        residual = residuals(self.optimizer)
        names = [name for name, _ in self.model.named_parameters()]
        left = [residual.get(name, torch.zeros(())) for name in names]
        return [c - r for c, r in zip(self.changed, left, strict=True)], [
            a - b.detach() for a, b in zip(self.start, self.model.parameters(), strict=True)
        ]


def conserved(accounts):
    """The mean of all ranks' changes without residuals is what parameters have moved."""
    for i, moved in enumerate(accounts[0][1]):
        close([sum(changed[i] for changed, _ in accounts) / len(accounts)], [moved], atol=1e-10)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_what_ranks_have_changed_is_what_parameters_move_and_residuals_hold(P, seed):
    def program(comm):
        alike, own, run, seen = random.Random(seed), random.Random(100 * seed + comm.rank), Run(comm), []
        for _ in range(12):
            kind = alike.choice(["steps", "uneven", "save", "discard", "synchronize", "join", "no_sync"])
            if kind == "steps":
                run.optimizer.synchronize()
                run.step(5)
            elif kind == "uneven":
                run.optimizer.synchronize()
                run.step(own.randrange(4))
            elif kind == "save":
                saved = copy.deepcopy((run.optimizer.state_dict(), comm.rank, run.model.state_dict()))
                again = Run(comm)
                again.model.load_state_dict(saved[2] if alike.random() < 0.5 else net(seed=7).state_dict())
                again.optimizer.load_state_dict(saved[0])
                if run.optimizer._engine.steps == 0:
                    again.model.load_state_dict(saved[2])
                again.count, again.start, again.changed, again.pending = run.count, run.start, run.changed, run.pending
                assert bits(again.model) == bits(run.model)
                run = again
            elif kind == "discard":
                run.optimizer.discard()
                run.settle(False)
            elif kind == "synchronize":
                run.optimizer.synchronize()
            elif kind == "no_sync":
                with run.optimizer.no_sync():
                    run.step(6)
                run.optimizer.synchronize()
            else:
                run.optimizer.synchronize()
                with run.optimizer.join():
                    run.step(own.randrange(11))
            if kind in ("synchronize", "join", "no_sync"):
                run.settle()
                seen.append(bits(run.model))
        run.optimizer.synchronize()
        run.settle()
        return run.account(), [*seen, bits(run.model)]

    results = simulate(P, program).results
    assert all(seen == results[0][1] for _, seen in results)
    conserved([account for account, _ in results])


@pytest.mark.parametrize("compressor", [SPARSE, QSGD(4, feedback=True), "none"], ids=["topk", "qsgd", "none"])
def test_a_run_that_was_saved_between_two_means_resumes_with_any_ranks_model(compressor):
    options = {"make": torch.optim.AdamW, "compressor": compressor, "outer_lr": 0.7, "outer_momentum": 0.9}

    def program(comm):
        run = Run(comm, **options)
        run.step(6)
        saved, models[comm.rank] = copy.deepcopy((run.optimizer.state_dict(), run.model.state_dict()))
        run.step(5)
        again = Run(comm, **options)
        again.step(3)
        again.model.load_state_dict(models[0])  # all ranks have taken a mean since they saved
        again.optimizer.load_state_dict(saved)
        again.count = 6
        again.step(5)
        return bits(run.model), bits(again.model)

    models = {}
    assert all(a == b for a, b in simulate(3, program).results)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_that_is_loaded_after_such_a_state_is_refused_in_the_next_mean(steps):
    def program(comm):
        run = Run(comm)
        run.step(6)
        saved, models[comm.rank] = copy.deepcopy((run.optimizer.state_dict(), run.model.state_dict()))
        run.step(4)
        run.optimizer.load_state_dict(saved)
        run.model.load_state_dict(models[0])
        with pytest.raises(CommunicationError, match=r"rank 1: parameter '.*': .* load the model before"):
            run.step(steps)
            run.optimizer.synchronize()
        run.model.load_state_dict(models[0])
        run.optimizer.load_state_dict(saved)
        run.optimizer.synchronize()
        return bits(run.model)

    models = {}
    assert len(set(simulate(3, program).results)) == 1


def test_ranks_that_have_loaded_different_models_are_told_in_the_next_mean():
    def program(comm):
        run = Run(comm)
        run.step(4)
        saved = run.optimizer.state_dict()
        run.model.load_state_dict(net(seed=int(comm.rank == 1)).state_dict())
        run.optimizer.load_state_dict(saved)
        with pytest.raises(CommunicationError, match=r"got others than rank 0's in '0\.weight' on rank 1"):
            run.step(4)
        run.optimizer.discard()
        return bits(run.model)

    assert len(set(simulate(3, program).results)) == 1


@pytest.mark.parametrize("new", [(3, 1), (3, 2), (3, 5), (2, 3)])
@pytest.mark.parametrize("compressor", [SPARSE, "none"], ids=["topk", "none"])
def test_states_of_another_number_of_ranks_keep_what_ranks_had_changed(new, compressor):
    P, size = new

    def before(comm):
        run = Run(comm, compressor=compressor)
        run.step(4)
        with run.optimizer.no_sync():
            run.step(comm.rank + 1)  # as many as its number, and one
        for sum_, part in zip(run.changed, run.pending, strict=True):
            sum_ += part
        return run.optimizer.state_dict(), run.model.state_dict(), run.changed, run.start

    olds = simulate(P, before).results
    mean = [sum(parts) / P for parts in zip(*(old[2] for old in olds), strict=True)]

    def after(comm):
        states = copy.deepcopy([old[0] for old in olds])
        run = Run(comm, compressor=compressor)
        run.model.load_state_dict(olds[0][1])
        run.optimizer.load_state_dict(redistribute(states, comm.rank, size))
        start = bits(run.model)
        run.step(5)
        run.optimizer.synchronize()
        run.settle()
        run.start, run.changed = olds[0][3], [a + b for a, b in zip(run.changed, mean, strict=True)]
        return start, run.account(), bits(run.model), run.inner.state_dict()["state"].keys()

    results = simulate(size, after).results
    assert len({(start, end) for start, _, end, _ in results}) == 1
    conserved([account for _, account, *_ in results])


def test_states_of_different_steps_are_refused():
    def program(comm):
        run = Run(comm)
        run.step(4)
        early = copy.deepcopy(run.optimizer.state_dict())
        run.step(4)
        return early, run.optimizer.state_dict()

    (early, _), (_, late) = simulate(2, program).results
    with pytest.raises(ValueError, match=r"expected those of one step, got those after \[1, 2\] steps"):
        redistribute([early, late], 0, 1)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("only", [False, True])
def test_discard_gets_rid_of_a_nan(bad, only):
    """Also in buffers and moments, which become those of the lowest rank where they are finite."""

    def program(comm):
        model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 3)).double()
        run = Run(comm, model, make=torch.optim.AdamW)
        run.step(4)
        kept = [bits(model), *(b.clone() for b in model.buffers())]
        run.step(1)
        if comm.rank == bad or only:
            with torch.no_grad():
                model[0](torch.full((2, 12), float("nan"), dtype=torch.float64))
                model(torch.full((2, 12), float("nan"), dtype=torch.float64))
            for p in model.parameters():
                p.grad.fill_(float("nan"))
            run.optimizer.step()
        with pytest.raises(NonFiniteError, match=rf"rank {0 if only else bad}: change of parameter '0\.weight'"):
            run.optimizer.synchronize()
        mine = [t.clone() for entries in run.inner.state.values() for t in entries.values()]
        run.optimizer.discard()
        assert bits(model) == kept[0] and all(p.grad is None for p in model.parameters())
        moments = [t for entries in run.inner.state.values() for t in entries.values()]
        if only:
            assert not moments
        elif comm.rank != bad:
            assert all(map(torch.equal, mine, moments))
        seen = [bits(model), b"".join(b.numpy().tobytes() for b in model.buffers()), comm.rank == bad or moments]
        run.step(8)
        assert all(p.isfinite().all() for p in model.parameters())
        return *seen, bits(model), all(b.isfinite().all() for b in model.buffers()) or only

    results = simulate(3, program).results
    assert len({(weights, end) for weights, _, _, end, _ in results}) == 1
    assert all(fine for *_, fine in results) and len({buffers for _, buffers, *_ in results}) == 1


@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_ranks_with_different_numbers_of_steps_end_with_the_same_bits(P):
    def program(comm, join):
        run = Run(comm, timeout=60)
        with run.optimizer.join() if join else contextlib.nullcontext():
            run.step(22 - 7 * comm.rank)
        run.optimizer.synchronize()
        run.optimizer.synchronize()
        run.settle()
        return run.account(), bits(run.model)

    for join in (False, True):
        results = simulate(P, lambda comm, join=join: program(comm, join)).results
        assert len({end for _, end in results}) == 1
        conserved([account for account, _ in results])


def test_a_rank_that_fails_in_join_ends_the_wait_of_the_others():
    def program(comm):
        run = Run(comm)
        wanted = KeyError if comm.rank == 1 else CommunicationError
        with pytest.raises(wanted, match="of this rank"), run.optimizer.join():
            run.step(2 if comm.rank == 1 else 9)
            raise KeyError("of this rank")
        run.optimizer.discard()
        run.step(4)
        return bits(run.model)

    assert len(set(simulate(3, program).results)) == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_fragment_whose_parameters_are_all_frozen_has_its_turn_like_others(whole):
    """All later means were left out."""

    def program(comm):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
        model[0].requires_grad_(False)
        inner, parts = torch.optim.SGD(model.parameters(), 0.1), [model[0], model[1]] if whole else [[], model]
        optimizer = LocalOptimizer(inner, model, comm, every=4, fragments=parts)
        with torch.no_grad():
            [p.fill_(0.5) for p in model.parameters()]
        optimizer.synchronize()
        for step in range(8):
            optimizer.zero_grad()
            data = torch.ones(2, 16) * (comm.rank + step + 1)
            model(data).square().mean().backward()
            optimizer.step()
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


def test_means_under_way_compare_nothing_while_parameters_change(monkeypatch):
    """The next one without a delay does."""
    compared = []
    monkeypatch.setattr(Replica, "compare", lambda replica, **_: compared.append(replica.transport.rank))

    def program(comm):
        model = net()
        optimizer = LocalOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, every=4, fragments=2, delay=2)
        for i in range(12):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, i)).backward()
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.05, 0.05)
        before = len(compared)
        optimizer.synchronize()
        return before

    assert simulate(2, program).results == [0, 0] and sorted(compared) == [0, 1]


@pytest.mark.parametrize("compressor", [SPARSE, ChunkedTopK(2, 64), QSGD(2, feedback=True)], ids=lambda own: own.name)
@pytest.mark.parametrize("stream", [{}, {"fragments": 2, "delay": 1, "alpha": 0.5}])
def test_weights_that_are_the_same_on_all_ranks_change_nothing(compressor, stream):
    """Whatever they are: residuals are in units of parameters, not of weights."""

    def program(comm, weighted):
        at, options = [240.0], {"compressor": compressor, **stream}
        run = Run(comm, net(), **options, **({"weight": lambda: at[0]} if weighted else {}))
        for weight in (240.0, 8.0, 0.25, 240.0):
            at[0] = weight
            run.step(3)
            run.optimizer.synchronize()
        return bits(run.model)

    plain, weighted = (simulate(3, lambda comm, w=w: program(comm, w)).results for w in (False, True))
    assert weighted == plain and len({*plain}) == 1


def test_changes_of_weight_zero_are_given_up():
    def program(comm):
        at = [1.0]
        run = Run(comm, net(), weight=lambda: at[0], compressor="none")
        run.step(4)
        before = parameters(run.model)
        at[0] = 0.0
        run.step(4)
        close(parameters(run.model), before)
        at[0] = float(comm.rank == 1)
        run.step(4)
        return [a - b for a, b in zip(parameters(run.model), before, strict=True)], run.pending

    for moved, _ in (results := simulate(3, program).results):
        close(moved, results[0][0])
    assert any(t.any() for t in results[0][0])


def test_fragments_are_modules_or_lists_of_parameters():
    def program(comm):
        model = net()
        for wrong in (["0.weight"], [["0.weight", "0.bias"], ["2.weight"]]):
            with pytest.raises(TypeError, match="fragments: expected modules or lists of parameters, got str"):
                LocalOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, every=4, fragments=wrong)

    simulate(2, program)
