"""The loops that users write, over MPI with its progress thread, compared with one process on the global batch."""

import pytest
from loop import FIND, RAISES, SAME
from loops import LOOPS
from runs import HOOK, ONE, OVERLAP, SPARSE, WAYS, Run, alike, bits, close, in_turn

from sparsecoll.torch.compressors import TopK

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("process_group")]


RIGHT = [(name, [w for w in (*WAYS, SPARSE) if loop.cell(w).startswith(SAME)]) for name, loop in LOOPS.items()]


@pytest.mark.parametrize(("way", "name"), in_turn(RIGHT))
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


@pytest.mark.parametrize("name", [name for name, ways in RIGHT if OVERLAP in ways])
def test_gradients_as_views_change_no_bit(comm, name):
    loop, found = LOOPS[name], []
    for as_view in (False, True):
        run = Run(OVERLAP, comm, loop.model, loop.inner, TopK(0.2, algo="allgather"), gradient_as_bucket_view=as_view)
        loop.body(run)
        run.close()
        found.append(bits(run.values()))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.cell(HOOK) == RAISES])
def test_ddp_raises(comm, name):
    loop = LOOPS[name]
    with pytest.raises(RuntimeError, match=r"in-place|prior iteration|marked (as )?ready|sparse gradient"):
        loop.body(Run(HOOK, comm, loop.model, loop.inner))
