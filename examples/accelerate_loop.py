"""Train with Accelerate and compressed gradients: a small net learns which of three numbers is the largest.

torchrun --nproc-per-node 4 examples/accelerate_loop.py
mpirun -n 4 python -m mpi4py examples/accelerate_loop.py
mpirun -n 4 python -m mpi4py examples/accelerate_loop.py --epochs 2 --resume-at 1
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import sparsecoll.torch


def prepare(accelerator, model, optimizer, *others, compressor="qsgd"):
    """accelerator.prepare(model, optimizer, ...) with DistributedOptimizer instead of DistributedDataParallel."""
    if accelerator.num_processes != dist.get_world_size():
        expected, count = dist.get_world_size(), accelerator.num_processes
        raise RuntimeError(f"Accelerator: expected {expected} processes, got {count}")
    options = {"compressor": compressor, "grad_scaler": accelerator.scaler}  # None without float16
    distributed = sparsecoll.torch.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    model = accelerator.prepare_model(model, evaluation_mode=True)  # not wrapped in DistributedDataParallel
    model.no_sync = lambda: distributed.no_sync()  # accumulated gradients are sent once
    optimizer, *others = accelerator.prepare(distributed, *others)
    keep_residuals(accelerator, distributed)
    return model, optimizer, *others


def keep_residuals(accelerator, optimizer):
    """Save and load the residuals of ranks 1, 2, ... beside Accelerate's own state, which holds those of rank 0."""
    folders = []

    def file(folder):
        return Path(folder, f"sparsecoll-{dist.get_rank()}.pt")

    def save(models, weights, folder):
        if dist.get_rank() > 0:
            sparsecoll.torch.save(optimizer.state_dict()["sparsecoll"], file(folder))

    def load(_, state):
        if folders and state["sparsecoll"]["rank"] != dist.get_rank():
            return {**state, "sparsecoll": sparsecoll.torch.load(file(folders[-1]))}
        return state

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
    optimizer.register_load_state_dict_pre_hook(load)


def samples(count: int, seed: int) -> TensorDataset:
    """Return vectors of 20 numbers, labelled with the index of the largest of the first three."""
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def accelerated(accumulate: int = 1, mixed_precision: str = "no") -> Accelerator:
    """Return an Accelerator whose processes are those of torchrun or of mpirun."""
    torch.set_num_threads(1)  # mpirun, unlike torchrun, leaves every rank all cores
    sparsecoll.torch.init_process_group()  # before Accelerate reads the number of processes
    return Accelerator(
        cpu=not torch.cuda.is_available(),  # otherwise Accelerate believes that each rank is the only one
        gradient_accumulation_steps=accumulate,
        mixed_precision=mixed_precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=42),  # one order for all ranks
    )


def train(accelerator, compressor="qsgd", epochs=2, clip=1.0, folder=None, resume_at=0):
    """Train and return (model, accuracy). Save the state in `folder` after each epoch; resume at epoch `resume_at`."""
    set_seed(42, device_specific=True)  # initial weights come from rank 0, dropout differs between ranks
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 100), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(100, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(4000, seed=0), batch_size=8, shuffle=True)
    tests = DataLoader(samples(300, seed=1), batch_size=50)
    model, optimizer, loader, tests = prepare(accelerator, model, optimizer, loader, tests, compressor=compressor)
    if resume_at:
        accelerator.load_state(folder)
    for epoch in range(resume_at, epochs):
        loader.set_epoch(epoch)
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        if folder is not None:
            accelerator.save_state(folder)
    return model, evaluate(accelerator, model, tests)


def evaluate(accelerator, model, loader) -> float:
    """Return the accuracy over the data of all ranks."""
    model.eval()
    right = count = 0
    with torch.no_grad():
        for x, y in loader:
            answers, truth = accelerator.gather_for_metrics((model(x).argmax(1), y))
            right, count = right + int((answers == truth).sum()), count + len(truth)
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressor", default="qsgd")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1, help="back-propagations per step (%(default)s)")
    parser.add_argument("--out", default="accelerate-results", help="folder for the state (%(default)s)")
    parser.add_argument("--resume-at", type=int, default=0, help="number of epochs done before (%(default)s)")
    args = parser.parse_args()
    accelerator = accelerated(args.accumulate)
    options = {"epochs": args.epochs, "folder": args.out, "resume_at": args.resume_at}
    _, accuracy = train(accelerator, args.compressor, **options)
    accelerator.print(f"{100 * accuracy:.1f} % right on {accelerator.num_processes} ranks")


if __name__ == "__main__":
    main()
