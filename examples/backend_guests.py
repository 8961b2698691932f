"""Train an embedding in Accelerate, Lightning or Ray Train, whose gradients the backend "sparsecoll" sums as rows.

torchrun --nproc-per-node 2 examples/backend_guests.py accelerate
torchrun --nproc-per-node 2 examples/backend_guests.py lightning
python examples/backend_guests.py ray
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

WORDS = 100


def bags(count: int = 400) -> TensorDataset:
    """Return bags of 8 words, and whether words of the first or of the second half are more frequent in them."""
    words = torch.randint(WORDS, (count, 8), generator=torch.Generator().manual_seed(0))
    return TensorDataset(words, (words < WORDS // 2).double().mean(1).round().long())


def classifier() -> torch.nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.EmbeddingBag(WORDS, 16, sparse=True), torch.nn.Linear(16, 2)).double()


def accelerate_losses(backend: str) -> list[float]:
    """Train with Accelerate; return the losses of this process."""
    from accelerate import Accelerator

    dist.init_process_group(backend)  # on the CPU, InitProcessGroupKwargs takes no other backend than gloo and MPI
    accelerator = Accelerator(cpu=True)
    net = classifier()
    optimizer = torch.optim.SGD(net.parameters(), 2.0)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(bags(), batch_size=8))
    losses = []
    for words, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(words), labels)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def lightning_losses(backend: str) -> list[float]:
    """Likewise with Lightning."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = classifier(), []

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 2.0)

        def training_step(self, batch):
            words, labels = batch
            loss = torch.nn.functional.cross_entropy(self.net(words), labels)
            self.losses.append(loss.item())
            return loss

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = DDPStrategy(process_group_backend=backend)
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(module, DataLoader(bags(), batch_size=8))
    return module.losses


def ray_losses(backend: str) -> list[float]:
    """Likewise with Ray Train, which starts two workers; return the losses of the first."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model

    def loop() -> None:
        assert dist.get_backend() == backend
        model, losses = prepare_model(classifier()), []
        optimizer = torch.optim.SGD(model.parameters(), 2.0)
        for words, labels in prepare_data_loader(DataLoader(bags(), batch_size=8)):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(words), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with tempfile.TemporaryDirectory() as folder:
            ray.train.report({"losses": losses}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    with tempfile.TemporaryDirectory() as folder:
        workers, run = ray.train.ScalingConfig(num_workers=2), ray.train.RunConfig(storage_path=folder)
        trainer = TorchTrainer(loop, torch_config=TorchConfig(backend), scaling_config=workers, run_config=run)
        return trainer.fit().metrics["losses"]


GUESTS = {"accelerate": accelerate_losses, "lightning": lightning_losses, "ray": ray_losses}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("guest", choices=GUESTS)
    parser.add_argument("--backend", default="sparsecoll")
    args = parser.parse_args()
    losses = GUESTS[args.guest](args.backend)
    if os.environ.get("RANK", "0") == "0":
        print("losses:", *(f"{loss:.9f}" for loss in losses))
    if dist.is_initialized():
        dist.destroy_process_group()
