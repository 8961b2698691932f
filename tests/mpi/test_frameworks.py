"""examples/hf_trainer.py, accelerate_loop.py and lightning_module.py, against one process on the global batch.

Under mpirun and under torchrun; skipped where the packages are missing; `make frameworks` installs them and runs this.
"""

import copy
import importlib.util
import itertools
import os
import sys
from pathlib import Path

import pytest
import torch

import sparsecoll.torch
from sparsecoll.torch import DistributedOptimizer

pytestmark = pytest.mark.mpi
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
NEEDS = {"hf_trainer": "transformers", "accelerate_loop": "accelerate", "lightning_module": "lightning"}
STEPS, BATCH, LR = 4, 8, 0.5
frameworks = pytest.mark.parametrize("name", NEEDS)


@pytest.fixture(scope="module")
def comm(process_group):
    before = dict(os.environ)
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield process_group
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def folder(comm, tmp_path):
    """One for all ranks."""
    return comm.bcast(tmp_path)


class Noted(torch.utils.data.Dataset):
    """Notes which samples are asked for."""

    def __init__(self, data):
        self.data, self.numbers = data, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, number):
        self.numbers.append(number)
        return self.data[number]


class Recorded(DistributedOptimizer):
    """Keeps the initial parameters."""

    made = None

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.initial = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        Recorded.made = self


class NoDropout(torch.nn.Dropout):
    def __init__(self, p=0.5, inplace=False):
        super().__init__(0.0)


class Example:
    """One of the examples with small data; runs for so many steps."""

    def __init__(self, name, comm, monkeypatch, steps=STEPS, accumulate=1):
        pytest.importorskip(NEEDS[name])
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        self.name, self.module, self.comm = name, sys.modules[name], comm
        self.per_epoch, self.accumulate = steps, accumulate
        self.data = None
        factory = "counting" if name == "hf_trainer" else "samples"
        original = getattr(self.module, factory)

        def noted(count, seed):
            if seed:
                return original(40, seed)
            self.data = Noted(original(steps * accumulate * BATCH * comm.size, seed))
            return self.data

        monkeypatch.setattr(self.module, factory, noted)
        monkeypatch.setattr(sparsecoll.torch, "DistributedOptimizer", Recorded)
        if name != "lightning_module":
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()

    def run(self, compressor, folder, epochs=1, clip=None, half=None, resume_at=0, **options):
        """(model, its evaluation) after so many epochs in all; `clip` None: the framework's default."""
        return getattr(self, self.name)(compressor, folder, epochs, clip, half, resume_at, options)

    def hf_trainer(self, compressor, folder, epochs, clip, half, resume_at, options):
        steps = epochs * self.per_epoch
        options = {
            "max_steps": steps,
            "bf16": half == "bf16",
            "gradient_accumulation_steps": self.accumulate,
            **options,
        }
        if clip is not None:
            options["max_grad_norm"] = clip
        options |= {"save_strategy": "steps", "save_steps": self.per_epoch}
        trainer = self.module.trainer(compressor, folder, **options)
        trainer.train(folder / f"checkpoint-{resume_at * self.per_epoch}" if resume_at else None)
        predicted = trainer.predict(self.module.counting(21, seed=2)).predictions
        return trainer.model, (trainer.evaluate()["eval_loss"], predicted.tobytes())

    def accelerate_loop(self, compressor, folder, epochs, clip, half, resume_at, options):
        accelerator = self.module.accelerated(self.accumulate, half or "no")
        if half == "fp16":  # what Accelerate does on a GPU
            accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=2.0**24)
        more = {} if clip is None else {"clip": clip}
        return self.module.train(accelerator, compressor, epochs, folder=folder, resume_at=resume_at, **more)

    def lightning_module(self, compressor, folder, epochs, clip, half, resume_at, options):
        from lightning.pytorch.plugins import MixedPrecision

        options = {"max_epochs": epochs, "accumulate_grad_batches": self.accumulate, "accelerator": "cpu", **options}
        if clip is not None:
            options["gradient_clip_val"] = clip
        if half == "fp16":
            options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24))]
        elif half:
            options["precision"] = f"{half}-mixed"
        resume = folder / "last.ckpt" if resume_at else None
        trainer, model = self.module.fit(compressor, folder, resume, **options)
        tests = torch.utils.data.DataLoader(self.module.samples(40, seed=1), batch_size=5)
        return model, trainer.validate(model, tests, verbose=False)[0]["accuracy"]

    def global_batches(self):
        """For each step the samples of all ranks, each of them once in an epoch."""
        count = self.per_epoch * self.accumulate * BATCH
        read = [numbers[:count] for numbers in self.comm.allgather(self.data.numbers)]
        assert sorted(itertools.chain(*read)) == list(range(len(self.data)))
        each = self.accumulate * BATCH
        return [[n for numbers in read for n in numbers[i : i + each]] for i in range(0, count, each)]


def loss_of(model, samples):
    if isinstance(samples[0], dict):
        rows = torch.stack([sample["input_ids"] for sample in samples])
        return model(input_ids=rows, labels=rows).loss
    x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
    return torch.nn.functional.cross_entropy(getattr(model, "net", model)(x), y)


def bits(model):
    return torch.cat([p.detach().view(-1) for p in model.parameters()]).numpy().tobytes()


def same_everywhere(comm, *values):
    assert comm.allgather(values) == [values] * comm.size


@frameworks
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_and_accumulation_are_those_of_one_process(comm, folder, monkeypatch, name, accumulate):
    """At the default norm of 1.0, with a loss that is steep enough for it."""
    monkeypatch.setattr(torch.nn, "Dropout", NoDropout)
    monkeypatch.setattr(torch.optim, "AdamW", lambda params, lr: torch.optim.SGD(params, LR))
    example = Example(name, comm, monkeypatch, accumulate=accumulate)
    options = (
        {"optim": "sgd", "learning_rate": LR, "per_device_train_batch_size": BATCH} if name == "hf_trainer" else {}
    )
    clip = None if name == "hf_trainer" else 0.1
    model, evaluation = example.run("none", folder, clip=clip, **options)
    same_everywhere(comm, bits(model), evaluation)
    batches = example.global_batches()

    def alone(clip):
        plain = copy.deepcopy(model).train()
        params = [p for p in plain.parameters() if p.requires_grad]
        order = {id(p): i for i, p in enumerate(p for g in Recorded.made.param_groups for p in g["params"])}
        with torch.no_grad():
            for p, trained in zip(plain.parameters(), model.parameters(), strict=True):
                p.copy_(Recorded.made.initial[order[id(trained)]])
        optimizer = torch.optim.SGD(params, LR)
        for batch in batches:
            optimizer.zero_grad()
            loss_of(plain, [example.data.data[i] for i in batch]).backward()
            torch.nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()
        return plain

    for mine, expected in zip(model.parameters(), alone(clip or 1.0).parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=3e-6)
    unclipped = zip(model.parameters(), alone(1e9).parameters(), strict=True)
    assert max(float((mine - other).detach().abs().max()) for mine, other in unclipped) > 1e-3


@frameworks
def test_accumulated_gradients_are_sent_once(comm, folder, monkeypatch, name):
    received = []
    for accumulate in (1, 2):
        with monkeypatch.context() as patch:
            example = Example(name, comm, patch, steps=2, accumulate=accumulate)
            before = sparsecoll.transport.as_transport(comm).traffic.total.bytes_received
            example.run("none", folder / str(accumulate))
            received.append(Recorded.made.traffic.total.bytes_received - before)
    assert received[0] == received[1] and (received[0] > 0 or comm.size == 1)


@frameworks
def test_resuming_goes_on_with_the_same_bits(comm, folder, monkeypatch, name):
    """Two epochs at once; and one, saved by rank 0 with a file of each other rank, then the other in new objects."""
    if name == "lightning_module":  # which does not save the state of random numbers
        monkeypatch.setattr(torch.nn, "Dropout", NoDropout)
    results = []
    for path, epochs, resume_at in (("a", 2, 0), ("b", 1, 0), ("b", 2, 1)):
        with monkeypatch.context() as patch:
            example = Example(name, comm, patch, steps=3)
            model, evaluation = example.run("topk", folder / path, epochs, resume_at=resume_at)
        comm.Barrier()
        assert Recorded.made.state_dict()["sparsecoll"]["step"] == 3 * epochs
        results.append((bits(model), evaluation))
    assert results[0] == results[2] != results[1]
    same_everywhere(comm, *results)
    assert len(list(folder.glob("b/**/sparsecoll-*"))) >= comm.size - 1


HALVES = [(name, half) for name in NEEDS for half in ("bf16", "fp16") if (name, half) != ("hf_trainer", "fp16")]


@pytest.mark.parametrize(("name", "half"), HALVES)
def test_half_precision(comm, folder, monkeypatch, name, half):
    """In fp16 with a scale that overflows in the first steps, on the CPU, which the Trainer doesn't offer."""
    example = Example(name, comm, monkeypatch, steps=12 if half == "fp16" else 3)
    model, evaluation = example.run("topk", folder, half=half)
    same_everywhere(comm, bits(model), evaluation)
    taken = Recorded.made.state_dict()["sparsecoll"]["step"]
    assert taken == 3 if half == "bf16" else 0 < taken < 12
    moved = zip(Recorded.made.initial, (p for g in Recorded.made.param_groups for p in g["params"]), strict=True)
    assert 0 < max(float((p.detach() - initial).abs().max()) for initial, p in moved) < 0.5


def test_a_model_in_ddp_is_refused(comm, folder, monkeypatch):
    example = Example("accelerate_loop", comm, monkeypatch)
    accelerator = example.module.accelerated()
    model = torch.nn.Linear(4, 2)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), comm)
    prepared = accelerator.prepare(model)
    if comm.size > 1:
        with pytest.raises(RuntimeError, match="inside of a DistributedDataParallel"):
            prepared(torch.ones(1, 4))
    optimizer.close()


def test_lightnings_own_strategy_is_refused(comm, folder, monkeypatch):
    example = Example("lightning_module", comm, monkeypatch)
    with pytest.raises(RuntimeError, match="inside of a DistributedDataParallel"):
        example.run("none", folder, strategy="ddp")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["hf_trainer", "accelerate_loop"])
def test_an_accelerator_that_sees_one_process_is_refused(comm, folder, monkeypatch, name):
    example = Example(name, comm, monkeypatch)
    if comm.size == 1:
        return
    with pytest.raises(RuntimeError, match=f"expected {comm.size} processes, got 1"):
        if name == "hf_trainer":
            example.run("none", folder, use_cpu=False)
        else:
            accelerator = example.module.Accelerator()
            example.module.train(accelerator, "none")
