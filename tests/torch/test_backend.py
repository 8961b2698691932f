"""The backend "sparsecoll" of torch.distributed: each call is as gloo's, and the name is known without an import."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from launching import python

torch = pytest.importorskip("torch")

import backend_calls  # noqa: E402
import backend_failures  # noqa: E402
import backend_more_calls  # noqa: E402, F401
import backend_ranks  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.algorithms import Dense  # noqa: E402
from sparsecoll.torch.backend import Options  # noqa: E402
from sparsecoll.torch.backend.lowbit import LowBitSums  # noqa: E402
from sparsecoll.torch.replica.calls import collective  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    job = python(Path(__file__).with_name("backend_ranks.py"), folder)
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert len(ranks) == backend_ranks.RANKS, job.stdout + job.stderr
    return {name: [text for rank in ranks for text in rank[name]] for name in ranks[0]}


@pytest.mark.parametrize("name", [*backend_calls.CASES, "again", "few_bits", "adapters", "unknown"])
def test_a_call_is_as_gloos(name, failed):
    assert not failed[name], "\n".join(failed[name])


def run_installed(folder, code):
    """What a program prints where the library is installed, so that torch finds its entry point."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    information = folder / "installed-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in entries.items()]
    (information / "entry_points.txt").write_text("".join(lines))
    job = python("-c", code, variables={"PYTHONPATH": f"{folder}:{ROOT}"})
    assert job.returncode == 0, job.stderr
    return job.stdout.split()


def test_the_name_is_known_without_an_import_of_the_library(tmp_path):
    code = (
        "import sys, torch.distributed as dist\n"
        "print(*[name for name in ('sparsecoll', 'numba', 'mpi4py') if name in sys.modules])\n"
        f"dist.init_process_group('sparsecoll', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "x = torch.sparse_coo_tensor([[1, 1]], torch.ones(2), (3,), check_invariants=True)\n"
        "dist.all_reduce(x)\n"
        "print(dist.get_backend(), *x.to_dense().tolist())\n"
    )
    assert run_installed(tmp_path, code.replace("import sys, ", "import sys, torch, ")) == [
        "sparsecoll",
        "0.0",
        "2.0",
        "0.0",
    ]


def test_it_is_registered_by_the_adapter_too():
    """Where torch does not call entry points."""
    code = "import sparsecoll.torch, torch.distributed as dist; print(dist.is_backend_available('sparsecoll'))"
    job = python("-c", code, variables={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)})
    assert job.stdout.split() == ["True"], job.stderr


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """What ranks have raised, by the name of the case, without those that failed or left on purpose."""
    folder, found = tmp_path_factory.mktemp("failures"), {}
    job = python(Path(__file__).with_name("backend_failures.py"), folder)
    for path in sorted(folder.glob("*.json")):
        for name, text in json.loads(path.read_text()).items():
            found.setdefault(name, []).extend([] if "on purpose" in text else [text])
    assert len(found) == len(backend_failures.TOGETHER + backend_failures.LEAVING), job.stdout + job.stderr
    return found


@pytest.mark.parametrize("name", [case.__name__ for case in backend_failures.LEAVING])
def test_a_rank_that_leaves_is_named_on_all_others(name, texts):
    assert len(texts[name]) == 3 and all(re.search(r"rank \d lost rank 3: ", text) for text in texts[name]), texts[name]


@pytest.mark.parametrize("name", ["one_rank_alone", "dense_alone"])
def test_all_ranks_raise_if_one_does_not_come(name, texts):
    """Those that wait for it name it; one that waits for another of these may have waited as long."""
    assert len(texts[name]) == 3 and all("waits for" in text for text in texts[name]), texts[name]
    assert any("of rank 2" in text for text in texts[name]), texts[name]


@pytest.mark.parametrize(
    "name, text",
    [
        (
            "other_shapes",
            "shape: expected the same value on all ranks, got [9, 2] on ranks 0, 2, [10, 2] on ranks",
        ),
        ("other_dtypes", "dtype: expected the same value on all ranks, got 'float64' on rank 0, 'float32' on ranks 1"),
        ("another_operation", "for a sparse tensor of torch.float32: use a dense one (x.to_dense())"),
        ("calls_that_torch_compares", "Detected mismatch between collectives on ranks"),
        ("one_wrong_argument", "then 16"),
        ("splitting", "split_group: use torch.distributed.new_group"),
        ("options_wrong_on_one_rank", "pg_options: expected sparsecoll.torch.backend.Options or None, got str"),
    ],
)
def test_what_cannot_be_summed_is_refused_on_all_ranks(name, text, texts):
    assert len(texts[name]) == 4 and all(text in other for other in texts[name]), texts[name]


def test_residuals_of_few_bits_are_of_one_tensor_and_one_for_each_place():
    """Of a transposed matrix, others; of a buffer that is summed in several lengths, the last one's."""

    def program(comm):
        matrix = torch.randn(40, 40, generator=torch.Generator().manual_seed(comm.rank))
        sums, fresh = (LowBitSums(Options(dense="int4", dense_below=0)) for _ in range(2))

        def summed(by, x):
            x = x.clone() if by is fresh else x
            collective(comm.transport, "all_reduce", None, lambda call: by.write(call, x, "sum"))
            return x

        first, saved = matrix.clone(), matrix.clone()
        summed(sums, matrix)
        matrix.copy_(saved)
        after, alone = summed(sums, matrix.T).clone(), summed(fresh, saved.T.contiguous())
        buffer = torch.randn(1000)
        for n in range(500, 540):
            summed(sums, buffer[:n])
        return torch.equal(after, alone), len(sums._kept), torch.equal(first, saved)

    assert simulate(2, program).results == [(True, 2, True)] * 2


def test_an_exact_sum_in_place_of_few_bits_has_the_limit_of_the_group(monkeypatch):
    limits, exact = [], Dense.__call__

    def watched(self, channel, *x):
        limits.append(channel.transport.timeout)
        return exact(self, channel, *x)

    monkeypatch.setattr(Dense, "__call__", watched)

    def program(comm):
        x, sums = torch.full((5000,), torch.inf), LowBitSums(Options(dense="int8", dense_below=0))
        collective(comm.transport, "all_reduce", 7.0, lambda call: sums.write(call, x, "sum"))
        return x.isinf().all()

    assert all(simulate(2, program).results) and limits == [7.0, 7.0]
