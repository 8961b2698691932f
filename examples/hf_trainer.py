"""Use the Transformers Trainer with compressed gradients: a small GPT-2 learns to count by 1, 2 or 3.

    torchrun --nproc-per-node 4 examples/hf_trainer.py
    mpirun -n 4 python -m mpi4py examples/hf_trainer.py
    mpirun -n 4 python -m mpi4py examples/hf_trainer.py --steps 90 --resume

Sharding, clipping, accumulation, evaluation and checkpoints are the Trainer's own.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import sparsecoll.torch


class SparseTrainer(Trainer):
    """A Trainer in which DistributedOptimizer reduces the gradients instead of DistributedDataParallel.

    Rank 0 saves the checkpoint; each other rank adds a file with its residuals.
    """

    def __init__(self, *args, compressor="qsgd", **kwargs):
        super().__init__(*args, **kwargs)
        self.compressor, self.resumed_from = compressor, None
        self.add_callback(SaveResiduals())
        if self.accelerator.num_processes != dist.get_world_size():
            expected, count = dist.get_world_size(), self.accelerator.num_processes
            raise RuntimeError(f"Trainer: expected {expected} processes, got {count}")

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            inner, names = super().create_optimizer(model), self.model.named_parameters()
            options = {"compressor": self.compressor, "grad_scaler": self.accelerator.scaler}  # None without float16
            distributed = sparsecoll.torch.DistributedOptimizer(inner, names, **options)
            distributed.register_load_state_dict_pre_hook(self.own_residuals)
            self.model.no_sync = lambda: distributed.no_sync()  # accumulated gradients are sent once
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
            self.optimizer = distributed
        return self.optimizer

    def train(self, resume_from_checkpoint=None, **kwargs):
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
        self.resumed_from = resume_from_checkpoint
        return super().train(resume_from_checkpoint, **kwargs)

    def own_residuals(self, _, state):
        """Return this rank's state: the Trainer, which calls this before it loads one, passes rank 0's to all ranks."""
        if self.resumed_from and state["sparsecoll"]["rank"] != dist.get_rank():
            path = Path(self.resumed_from, f"sparsecoll-{dist.get_rank()}.pt")
            return {**state, "sparsecoll": sparsecoll.torch.load(path)}
        return state


class SaveResiduals(TrainerCallback):
    """Saves the residuals of ranks 1, 2, ... as files beside optimizer.pt, which holds those of rank 0."""

    def on_save(self, args, state, control, optimizer=None, **kwargs):
        if dist.get_rank() > 0:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"sparsecoll-{dist.get_rank()}.pt"
            sparsecoll.torch.save(optimizer.state_dict()["sparsecoll"], path)


def counting(count: int, seed: int, length: int = 12, vocabulary: int = 40) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count up from a random number by 1, 2 or 3, modulo the size of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(vocabulary, (count, 1), generator=generator)
    rows = (start + torch.randint(1, 4, (count, 1), generator=generator) * torch.arange(length)) % vocabulary
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(compressor="qsgd", folder="hf-results", **options) -> SparseTrainer:
    """Return a Trainer of a small GPT-2; `options` are those of TrainingArguments."""
    torch.set_num_threads(1)  # mpirun, unlike torchrun, leaves every rank all cores
    sparsecoll.torch.init_process_group()  # before Transformers reads the number of processes
    config = GPT2Config(n_layer=2, n_head=2, n_embd=48, n_positions=12, vocab_size=40, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(42)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # otherwise the Trainer counts one token too many per sequence
    defaults = {
        "use_cpu": not torch.cuda.is_available(),  # otherwise Accelerate believes that each rank is the only one
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "seed": 42 + dist.get_rank(),  # dropout differs between ranks
        "data_seed": 42,  # the order of samples does not
        "save_strategy": "no",
        "logging_steps": 10,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return SparseTrainer(
        model=model,
        args=TrainingArguments(str(folder), **{**defaults, **options}),
        train_dataset=counting(2000, seed=0),
        eval_dataset=counting(100, seed=1),
        compressor=compressor,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressor", default="qsgd")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=1, help="back-propagations per step (%(default)s)")
    parser.add_argument("--out", default="hf-results", help="folder for checkpoints (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in that folder")
    args = parser.parse_args()
    run = trainer(
        args.compressor,
        args.out,
        max_steps=args.steps,
        gradient_accumulation_steps=args.accumulate,
        save_strategy="steps",
        save_steps=30,
    )
    run.train(resume_from_checkpoint=args.resume or None)
    loss = run.evaluate()["eval_loss"]
    if dist.get_rank() == 0:
        print(f"evaluation loss {loss:.3f} on {dist.get_world_size()} ranks")


if __name__ == "__main__":
    main()
