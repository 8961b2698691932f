"""The loops that users write, over MPI with its progress thread, compared with one process on the global batch."""

import pytest

torch = pytest.importorskip("torch")

from loop import FIND, RAISES, SAME  # noqa: E402
from loops import LOOPS  # noqa: E402
from runs import HOOK, ONE, SPARSE, WAYS, Run, alike, close  # noqa: E402

from sparsecoll.torch import init_process_group  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.loops]


@pytest.fixture(scope="module")
def comm():
    from mpi4py import MPI

    torch.set_num_threads(1)
    init_process_group(MPI.COMM_WORLD)
    yield MPI.COMM_WORLD
    torch.distributed.destroy_process_group()


RIGHT = [(way, name) for name, loop in LOOPS.items() for way in (*WAYS, SPARSE) if loop.cell(way).startswith(SAME)]


@pytest.mark.parametrize(("way", "name"), RIGHT)
def test_a_loop_does_what_one_process_does(comm, way, name):
    loop = LOOPS[name]
    alone = Run(ONE, comm, loop.model, loop.inner)
    loop.body(alone)
    options = {"find_unused_parameters": True} if loop.cell(way) == FIND else {}
    run = Run(way, comm, loop.model, loop.inner, **options)
    loop.body(run)
    run.close()
    assert alike(comm, run.values())
    close(run.values(), alone.values(), loop.rtol)


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.cell(HOOK) == RAISES])
def test_ddp_raises(comm, name):
    loop = LOOPS[name]
    with pytest.raises(RuntimeError, match=r"in-place|prior iteration|marked (as )?ready"):
        loop.body(Run(HOOK, comm, loop.model, loop.inner))
