"""`warmup` compiles kernels into the cache, and a line says when kernels are compiled."""

import logging
import os
import subprocess
import sys

import pytest

from sparsecoll.cli import warmup
from sparsecoll.cli.main import _announce_compilation, main

CALL = """
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
import numpy as np
import sparsecoll
{call}
"""
CALLS = {
    "top-k": "print(sparsecoll.select.topk(np.arange(9, dtype=np.float32), 3).nnz)",
    "a kernel whose closure holds another": (
        "x = sparsecoll.SparseVector([1, 2, 5], np.ones(3, np.float32), 9);"
        "print(sparsecoll.formats.decode(sparsecoll.formats.encode(x, 'packed_codes'), 9).nnz)"
    ),
}


def run(folder, *command):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    return subprocess.check_output([sys.executable, *command], text=True, env=environment, timeout=900)


@pytest.mark.parametrize("call", CALLS)
def test_kernels_are_compiled_once_with_one_line(call, tmp_path):
    if not warmup.cache():
        pytest.skip("the reference kernels are used")
    first, second = (run(tmp_path, "-c", CALL.format(call=CALLS[call])) for _ in range(2))
    assert first.count("kernels are compiled for the first time, into") == 1 and str(tmp_path) in first
    assert second == "3\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_line_is_shown_on_a_terminal(terminal, monkeypatch, capsys):
    logger = logging.getLogger("sparsecoll.kernels.cpu.intrinsics.cache")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    _announce_compilation()
    logger._cache.clear()
    logger.info("kernels are compiled")
    assert capsys.readouterr().err == ("sparsecoll: note: kernels are compiled\n" if terminal else "")
    logger._cache.clear()


def test_rows_come_one_by_one(monkeypatch, capsys):
    shown = []

    def warm_up():
        yield "some calls", 1.5, 7
        shown.append(capsys.readouterr().out)
        yield "other calls", 0.25, 0

    monkeypatch.setattr(warmup, "warm_up", warm_up)
    main(["warmup"])
    assert shown == ["     1.5 s     7 compiled  some calls\n"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert f" s in all; the kernels are in {warmup.cache() or 'no folder'}" in last


def test_all_calls_can_be_made(monkeypatch):
    """Without compiling, with the kernels that this process has."""
    monkeypatch.setattr(warmup, "LENGTH", 2000)
    kinds = [kind for kind, *_ in warmup.warm_up()]
    assert kinds[0] == "allreduce of float32" and len(kinds) >= 5


AFTER = """
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
from sparsecoll.cli.main import main
main(["bench", "--n", "1e6", "6e6", "--density", "0.01", "--repeat", "1", "--algo", "auto", "oktopk", "dense"])
main(["simulate", "--n", "1e5", "--ranks", "5", "--algo", "allgather", "--format", "auto", "coo", "packed_codes"])
"""


@pytest.mark.slow
def test_nothing_is_left_to_compile(tmp_path):
    if not warmup.cache():
        pytest.skip("the reference kernels are used")
    printed = run(tmp_path, "-m", "sparsecoll", "warmup")
    assert f"the kernels are in {tmp_path}" in printed
    assert all(" 0 compiled " in line for line in run(tmp_path, "-m", "sparsecoll", "warmup").splitlines()[:-1])
    assert "compiled for the first time" not in run(tmp_path, "-c", AFTER)
