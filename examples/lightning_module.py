"""Train a LightningModule with compressed gradients: a small net learns which of three numbers is the largest.

    torchrun --nproc-per-node 4 examples/lightning_module.py
    mpirun -n 4 python -m mpi4py examples/lightning_module.py
    mpirun -n 4 python -m mpi4py examples/lightning_module.py --steps 300 --resume lightning-results/last.ckpt

Lightning shards the data over them, clips, accumulates and saves.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import sparsecoll.torch


class SparseStrategy(DDPStrategy):
    """DDP's processes and sharding; DistributedOptimizer reduces the gradients."""

    def configure_ddp(self):
        """Do not wrap the model."""

    def block_backward_sync(self):
        """Return a context for all but the last back-propagation of a step."""
        return self.optimizers[0].no_sync()


class Classifier(lightning.LightningModule):
    def __init__(self, compressor="qsgd", folder="lightning-results"):
        super().__init__()
        self.compressor, self.folder = compressor, Path(folder)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(20, 100), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(100, 3)
        )

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)  # of "16-mixed"
        options = {"compressor": self.compressor, "grad_scaler": scaler or torch.amp.GradScaler(enabled=False)}
        return sparsecoll.torch.DistributedOptimizer(optimizer, self.named_parameters(), **options)

    def on_train_start(self):
        torch.manual_seed(42 + self.global_rank)  # from here on, dropout differs between ranks

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        """Save this rank's residuals. Lightning calls this on every rank, but writes only rank 0's checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = checkpoint["optimizer_states"][0]["sparsecoll"]
        sparsecoll.torch.save(own, self.folder / f"sparsecoll-{checkpoint['global_step']}-{self.global_rank}.pt")

    def on_load_checkpoint(self, checkpoint):
        """Load this rank's residuals into the checkpoint, which Lightning reads from rank 0's file on every rank."""
        path = self.folder / f"sparsecoll-{checkpoint['global_step']}-{self.global_rank}.pt"
        checkpoint["optimizer_states"][0]["sparsecoll"] = sparsecoll.torch.load(path)


def samples(count: int, seed: int) -> TensorDataset:
    """Return vectors of 20 numbers, labelled with the index of the largest of the first three."""
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def fit(compressor="qsgd", folder="lightning-results", resume=None, batch=8, **options):
    """Train and return (trainer, module); `options` are those of Trainer."""
    torch.set_num_threads(1)  # mpirun, unlike torchrun, leaves every rank all cores
    sparsecoll.torch.init_process_group()
    lightning.seed_everything(42)  # the same on all ranks: it shuffles the samples before they are distributed
    module = Classifier(compressor, folder)
    defaults = {
        "accelerator": "auto",
        "devices": dist.get_world_size(),  # ranks per node; with several nodes also pass num_nodes=
        "strategy": SparseStrategy(),
        "gradient_clip_val": 1.0,
        "default_root_dir": str(folder),
        "callbacks": [ModelCheckpoint(str(folder), filename="last", enable_version_counter=False)],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(**{**defaults, **options})
    loader = DataLoader(samples(4000, seed=0), batch_size=batch, shuffle=True)
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer, module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressor", default="qsgd")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--accumulate", type=int, default=1, help="back-propagations per step (%(default)s)")
    parser.add_argument("--out", default="lightning-results", help="folder for checkpoints (%(default)s)")
    parser.add_argument("--resume", help="checkpoint from which to resume")
    args = parser.parse_args()
    options = {"max_steps": args.steps, "accumulate_grad_batches": args.accumulate}
    trainer, module = fit(args.compressor, args.out, args.resume, **options)
    metrics = trainer.validate(module, DataLoader(samples(300, seed=1), batch_size=50), verbose=False)
    if trainer.is_global_zero:
        print(f"{100 * metrics[0]['accuracy']:.1f} % right on {trainer.world_size} ranks")


if __name__ == "__main__":
    main()
