"""Study scaling without a cluster: exact bytes and modelled seconds of several algorithms for growing P.

python examples/scaling.py
python examples/scaling.py --ranks 4 16 64 256 --n 1000000 --density 0.01
"""

from __future__ import annotations

import argparse

import numpy as np

import sparsecoll

ALGORITHMS = ("dense", "allgather", "sparcml", "gtopk", "oktopk")


def program(comm, n: int, k: int, algo: str) -> int:
    """Run one rank's call and return the bytes it received; ranks have half of their support in common."""
    shared, own = np.random.default_rng(0), np.random.default_rng(1 + comm.rank)
    indices = np.unique(np.concatenate([shared.choice(n, k // 2, replace=False), own.choice(n, k - k // 2)]))
    x = sparsecoll.SparseVector(indices, own.standard_normal(indices.size).astype(np.float32), n)
    sparsecoll.allreduce(comm, x, algo, k=k)
    return sparsecoll.traffic(comm).total.bytes_received


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--density", type=float, default=0.01)
    options = parser.parse_args()
    network = sparsecoll.Network(alpha=50e-6, beta=8e-9)  # 1 Gb/s Ethernet
    print(f"{'algorithm':<12}{'ranks':>6}{'kB received':>14}{'modelled ms':>14}")
    for algo in ALGORITHMS:
        for P in options.ranks:
            k = max(1, int(options.density * options.n))
            simulation = sparsecoll.simulate(P, lambda comm, k=k, a=algo: program(comm, options.n, k, a), network)
            print(f"{algo:<12}{P:>6}{max(simulation.results) / 1e3:>14.1f}{1e3 * simulation.seconds:>14.2f}")


if __name__ == "__main__":
    main()
