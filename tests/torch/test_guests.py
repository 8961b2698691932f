"""Libraries that train on the backend "sparsecoll" get the losses that they get with gloo.

Skipped where they are missing; `make frameworks` installs them.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from launching import python

np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")


def run(script, folder, *arguments):
    job = python(Path(__file__).with_name(script), folder, *arguments)
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.parametrize("guest", ["accelerate", "lightning"])
def test_losses_are_those_with_gloo(guest, tmp_path):
    if importlib.util.find_spec(guest) is None:
        pytest.skip(f"no {guest}")
    run("guest_ranks.py", tmp_path, guest)
    for rank in range(2):
        (expected, none), (losses, sums) = (
            json.loads((tmp_path / f"{backend}.{rank}").read_text()) for backend in ("gloo", "sparsecoll")
        )
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        assert none == 0 and sums == len(losses) == 25


def test_losses_in_ray_are_those_with_gloo():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no ray")
    example = Path(__file__).parents[2] / "examples/backend_guests.py"
    jobs = [python(example, "ray", "--backend", backend) for backend in ("gloo", "sparsecoll")]
    expected, losses = (re.findall(r"^losses: (.*)", job.stdout, re.M) for job in jobs)
    assert losses == expected and len(losses[0].split()) == 25, jobs[1].stdout + jobs[1].stderr


def test_torchft_goes_on_without_a_replica_and_with_a_new_one(tmp_path):
    """With the losses of one replica alone: a step has the same samples on any number of them."""
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("no torchft")
    run("torchft_replicas.py", tmp_path)
    found = {path: np.loadtxt(path, ndmin=2) for path in tmp_path.glob("*/[012]")}
    alone = [np.loadtxt(path, ndmin=2) for path in tmp_path.glob("*/alone")]
    expected = {step: loss for rows in alone for step, loss, _ in rows}
    assert (len(found), len(alone)) == (6, 2)
    for path, rows in found.items():
        assert set(rows[:, 2]) >= ({3} if path.name == "2" else {2, 3})
        np.testing.assert_allclose(rows[:, 1], [expected[step] for step in rows[:, 0]], rtol=1e-6)
