"""torch.profiler shows buckets, and the work in them, where it records all threads; `seconds` adds the work up."""

import pytest

torch = pytest.importorskip("torch")

from nets import batch, loss_of, net, train  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, SparseSGD  # noqa: E402

WAYS = {
    "DistributedOptimizer": lambda model, comm: DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, comm, bucket_bytes=6000
    ),
    "SparseSGD": lambda model, comm: SparseSGD(model.parameters(), 0.1, comm=comm),
}


@pytest.mark.parametrize("way", WAYS)
def test_torchs_profiler_shows_buckets_and_the_work_in_them(way):
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    model = net()
    optimizer = WAYS[way](model, None)
    with torch.profiler.profile(experimental_config=all_threads) as profile:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(0, step)).backward()
            optimizer.step()
    seen = {event.key for event in profile.key_averages()}
    assert {"sparsecoll: bucket 0", "sparsecoll: select"} <= seen


def test_seconds_by_kind_of_work():
    def program(comm):
        model = net()
        optimizer = WAYS["DistributedOptimizer"](model, comm)
        train(comm, model, optimizer, range(3))
        return optimizer.seconds

    for seconds in simulate(2, program).results:
        assert seconds["select"] > 0 and seconds["exposed"] > 0
