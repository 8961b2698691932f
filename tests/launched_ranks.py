"""Ranks that one process forks, so that not each of them imports torch. If one fails, the others are not ended."""

import json
import os
import signal
import socket
import tempfile
import time
from pathlib import Path

ENDS_WITHIN = 200  # seconds after which a process that has not ended counts as hanging


def launched(case, size, folder):
    """Run a case on ranks that are forked; return the folder for `ENDED` in each of them, None when all have ended."""
    ports = tempfile.mkdtemp(dir=folder)
    Path(ports, "ended").mkdir()
    children = {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = time.monotonic()
    for rank in range(size):
        pid = os.fork()
        if not pid:
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="x"
            )
            out = os.open(f"{ports}/{rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(out, 1), os.dup2(out, 2)
            return Path(ports, "ended")
        children[pid] = rank
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            if time.monotonic() - started > ENDS_WITHIN:
                for hung in children:
                    os.kill(hung, signal.SIGKILL)
            time.sleep(0.02)
            continue
        rank = children.pop(pid)
        text = Path(f"{ports}/{rank}").read_text()
        row = {"case": case, "rank": rank, "status": os.waitstatus_to_exitcode(status), "text": text}
        print(json.dumps(row), flush=True)
    return None
