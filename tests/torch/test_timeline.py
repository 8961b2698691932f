"""Timeline: spans of buckets and of the work in them; torch.profiler shows the buckets, too."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import batch, loss_of, net, train  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, Timeline  # noqa: E402


def test_what_overlaps_and_what_does_not_is_in_the_timeline(tmp_path):
    timelines = [Timeline(rank) for rank in range(2)]

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(
            inner, model.named_parameters(), comm, "topk", bucket_bytes=6000, timeline=timelines[comm.rank]
        )
        train(comm, model, optimizer, range(3))
        return optimizer.seconds

    seconds = simulate(2, program).results[0]
    assert seconds["select"] > 0 and seconds["exposed"] > 0
    timelines[1].save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"gradients", "bucket 0", "bucket 1", "select", "encode", "wait"} <= names
    spans = [e for e in events if e["ph"] == "X"]
    assert all(e["pid"] == 1 and e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    buckets = [e for e in spans if e["name"].startswith("bucket")]
    inner = [e for e in spans if e["name"] == "select"]
    for e in inner:
        assert any(b["ts"] <= e["ts"] and e["ts"] + e["dur"] <= b["ts"] + b["dur"] + 1 for b in buckets)
    timelines[1].clear()
    assert np.isfinite(seconds["wait"])


def test_torchs_profiler_shows_buckets_where_it_records_all_threads():
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    model = net()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    with torch.profiler.profile(experimental_config=all_threads) as profile:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(0, step)).backward()
            optimizer.step()
    assert "sparsecoll: bucket 0" in {event.key for event in profile.key_averages()}
