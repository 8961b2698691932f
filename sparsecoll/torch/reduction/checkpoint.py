"""Checkpoint files that stay complete if the process is killed while it writes."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Call torch.save atomically: the file has the old content or the new one, whenever the process is killed.

    Residuals differ between ranks, so every rank saves its own file, and the checkpoint of the job is complete when all
    have. The state is first written to a temporary file in the same folder, which needs the space twice.

    Args:
        state: a `state_dict()`, or anything else that torch.save takes.
        path: name of the file, whose mode is kept, or of a link to it.

    Raises:
        OSError: The file cannot be written; the old one is unchanged. If the disk becomes full, torch.save makes a
            RuntimeError of it.
    """
    path = Path(os.path.realpath(path))
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with part.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name is on the disk, too
    finally:
        os.close(folder)


def load(path: str | os.PathLike[str]) -> Any:
    """Load what `save` wrote, with `weights_only=True`: tensors, numbers, strings and containers of them, but no code.

    Args:
        path: name of the file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, or contains something else.
    """
    try:
        return torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"{path}: expected a file of tensors that torch.save wrote, torch.load raised {reason}"
        ) from error
