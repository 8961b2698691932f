"""The nets of perf/convergence.py, their data and how they are trained.

| task | net | data | quality |
|---|---|---|---|
| vgg | four convolutions with batch norm, two linear layers, 333 k parameters | Fashion-MNIST | accuracy, test images |
| resnet | seven convolutions with batch norm and shortcuts, 78 k | Fashion-MNIST | accuracy, test images |
| resnet9 | the same for nine epochs, not three | | |
| lstm | embedding, bidirectional LSTM, 591 k | e-mails, spam or not | accuracy, a fifth of the e-mails |
| mlp | four linear layers with batch norm, 313 k | speech | accuracy of the acoustic unit 30 ms ahead, test prompts |
| text | byte-level transformer of four layers, 1.3 M; AdamW | State of the Union addresses | bits per byte, others |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import real_data
import torch
from torch import nn
from torch.nn import functional

BATCH = 128


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm beside a shortcut (He, Zhang, Ren, Sun, CVPR 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(main(x) + shortcut(x))."""
        return torch.relu(self.main(x) + self.shortcut(x))


class Spam(nn.Module):
    """The largest outputs of a bidirectional LSTM over the words, and a linear layer."""

    def __init__(self, vocabulary: int = 8192, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores (count, 2) of ids (count, words)."""
        return self.head(self.lstm(self.words(ids))[0].amax(1))


def vgg(x: torch.Tensor) -> nn.Module:
    """Return a VGG-like net for images of the shape of x."""
    channels, side = x.shape[1], x.shape[2] // 8
    layers: list[nn.Module] = []
    for inputs, outputs, pool in ((channels, 16, 1), (16, 32, 0), (32, 32, 1), (32, 64, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * pool
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * side**2, 512), nn.ReLU(), nn.Linear(512, 10))


def resnet(x: torch.Tensor) -> nn.Module:
    """Return a ResNet for images of the shape of x."""
    stem = (nn.Conv2d(x.shape[1], 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = (Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def mlp(x: torch.Tensor) -> nn.Module:
    """Return a net with scores of 64 units."""
    layers: list[nn.Module] = []
    for inputs in (x.shape[1], 256, 256):
        layers += [nn.Linear(inputs, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 64))


class Block(nn.Module):
    """A layer of a transformer: causal attention and two linear layers, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what follows x, of shape (count, length, width)."""
        q, k, v = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Transformer(nn.Module):
    """Scores (count, 256, length) of the next byte, of bytes (count, length)."""

    def __init__(self, length: int, width: int = 160, layers: int = 4) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, width // 32) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        return self.head(self.norm(self.blocks(self.bytes(x.int()) + self.places))).transpose(1, 2)


@dataclass
class Task:
    """A net, its data, and how it is trained: by SGD with a momentum of 0.9, or by AdamW."""

    data: Callable[[], tuple[real_data.Set, real_data.Set]]
    net: Callable[[torch.Tensor], nn.Module]
    epochs: float
    lr: float
    batch: int = BATCH
    clip: float | None = None
    adam: bool = False

    @property
    def unit(self) -> str:
        """The unit of its quality: lower is better in bits per byte."""
        return "bits per byte" if self.adam else "%"


TASKS = {
    "vgg": Task(real_data.fashion_mnist, vgg, 3, 0.1),
    "resnet": Task(real_data.fashion_mnist, resnet, 3, 0.2),
    "resnet9": Task(real_data.fashion_mnist, resnet, 9, 0.2),
    "lstm": Task(real_data.emails, lambda _: Spam(), 16, 1.0, clip=1.0),
    "mlp": Task(real_data.speech, mlp, 8, 0.1, batch=256),
    "text": Task(real_data.addresses, lambda x: Transformer(x.shape[1]), 0.25, 2e-3, batch=32, adam=True),
}


@cache
def data(name: str, validate: bool = False) -> tuple[real_data.Set, real_data.Set]:
    """Return (train, test) of a task, which each process reads once; with `validate`, the last sixth of train as test.

    Options are chosen by the latter, so that no choice has seen the test set.
    """
    train, test = TASKS[name].data()
    if not validate:
        return train, test
    cut = len(train[1]) * 5 // 6
    return (train[0][:cut], train[1][:cut]), (train[0][cut:], train[1][cut:])


def quality(model: nn.Module, test: real_data.Set, unit: str = "%") -> float:
    """Return the share of right answers in %, or the mean loss in bits per byte."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in zip(test[0].split(250), test[1].split(250), strict=True):
            scores = model(x)
            if unit == "%":
                total += 100 * int((scores.argmax(1) == y).sum())
            else:
                total += float(functional.cross_entropy(scores, y.long(), reduction="sum")) / math.log(2)
    model.train()
    return total / test[1].numel()
