"""python guest_ranks.py FOLDER GUEST: two forked ranks of examples/backend_guests.py, on gloo and on the backend.

Each writes its losses, and how many tensors the library has summed, to FOLDER/BACKEND.RANK.
"""

import importlib.util
import json
import os
import socket
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # which DDP imports

import sparsecoll
import sparsecoll.torch
from sparsecoll.torch.backend import ProcessGroupSparsecoll

RANKS = 2


def worker(rank, folder, guest, backend, port):
    spec = importlib.util.spec_from_file_location("guests", Path(__file__).parents[2] / "examples/backend_guests.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "1", **{k: str(v) for k, v in place.items()}}
    original, sums = ProcessGroupSparsecoll._sum_sparse, []
    ProcessGroupSparsecoll._sum_sparse = lambda *args, **kwargs: sums.append(original(*args, **kwargs))
    losses = example.GUESTS[guest](backend)
    Path(folder, f"{backend}.{rank}").write_text(json.dumps([losses, len(sums)]))
    os._exit(0)


def main(folder, guest):
    warnings.simplefilter("ignore")
    importlib.import_module(guest)
    sparsecoll.allreduce(None, sparsecoll.RowSparse([1], np.ones((1, 2), np.float32), 3))  # loads the kernels
    for backend in ("gloo", "sparsecoll"):
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        torch.multiprocessing.start_processes(worker, (folder, guest, backend, port), RANKS, start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
