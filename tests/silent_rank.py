"""`sparsecoll doctor` on the first rank; the last one never joins, until the first has ended."""

import os
import sys
import time
from pathlib import Path

from sparsecoll.cli import doctor
from sparsecoll.cli.main import main

if __name__ == "__main__":
    done = Path(sys.argv[1])
    rank = next(os.environ[name] for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
    if rank == "0":
        doctor.SELF_TEST_SECONDS = 2
        try:
            main(["doctor"])
        except SystemExit as ended:
            print(f"exit status {ended.code}", flush=True)
        finally:
            done.touch()
    else:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            import mpi4py.MPI  # noqa: F401 - or no process passes MPI_Init
        while not done.exists():
            time.sleep(0.1)
