"""Checkpoint files that a crash cannot spoil."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """torch.save, atomically: the file has the old content or the new one, whenever this process is killed.

    Residuals differ from rank to rank: every rank saves a file of its own, and it is a checkpoint of the job when all
    have. Written beside the file first, which takes as much room again.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name is on the disk, too
    finally:
        os.close(folder)


def load(path: str | os.PathLike[str]) -> Any:
    """What `save` wrote; tensors, numbers, texts and containers of them, and no code."""
    return torch.load(path, weights_only=True)
