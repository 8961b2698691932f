"""Counted words and modelled times on the simulator, beside formulas and figures of the papers.

    python perf/volume.py --json perf/results/volume.json
    python perf/volume.py --scaling --ranks 4 16 64 256 1024 --json perf/results/scaling.json      # hours

Words are 4 bytes, received by the busiest rank; COO, float32. Modelled times charge a message alpha + beta * bytes, and
computation COSTS. A vector that is s times shorter takes the same time on a network and a processor that are s times
slower, except for message headers, which count s times as much: so that 1024 ranks fit in memory and end in minutes, n
is divided by the `scale` in each row of --scaling.
"""

from functools import partial
from itertools import product

import formulas
import harness
import numpy as np
from harness import drawn, load, markdown, source

import sparsecoll
from sparsecoll import Costs, DenseVector, Network, SparseVector
from sparsecoll.algorithms.primitives import estimates, pipeline
from sparsecoll.bench import algorithm
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.channel import Channel

SEARCH = ("agree", "repartition", "threshold", "overlap", "nodes", "pattern")  # phases that move counts or bits
DOUBLE = "sparcml:variant=recursive_double"
ALGORITHMS = {  # name: (algorithm, its words of (n, k, P))
    "dense": ("dense", lambda n, k, P: formulas.dense_words(n, P)),
    "allgather": ("allgather", lambda n, k, P: formulas.allgather_words(k, P)),
    "sparcml, recursive_double": (DOUBLE, lambda n, k, P: (2 * k * estimates.rounds(P), 2 * k * (P - 1))),
    "sparcml, dynamic": ("sparcml:variant=dynamic", formulas.sparcml_words),
    "densestream": ("densestream:repartition=average", lambda n, k, P: formulas.densestream_words(k, P)),
    "gtopk": ("gtopk", lambda n, k, P: formulas.gtopk_words(k, P) / 2),
    "spardl": ("spardl", lambda n, k, P: formulas.spardl_words(k, P)),
    "cltk": ("cltk", lambda n, k, P: formulas.cltk_words(k, P)),
}
for name in ("oktopk", "oktopk:repartition=even", "oktopk:balance_factor=1e9"):  # the others for Ok-Topk's Figure 7
    ALGORITHMS[name] = (name, lambda n, k, P: formulas.oktopk_words(k, P))
MODELS = {"BERT": (133_547_324, 0.01), "VGG-16": (14_728_266, 0.02), "LSTM": (27_569_568, 0.02)}  # Ok-Topk, Table 2
NETWORKS = {"1 Gb/s": Network(50e-6, 8e-9), "10 Gb/s": Network(20e-6, 8e-10), "100 Gb/s": Network(2e-6, 8e-11)}
COSTS = {"select": 1.47e-10, "encode": 1.39e-9, "decode": 9.65e-10, "merge": 2.48e-9}  # of one core of an AMD EPYC
COSTS |= {"dense_merge": 1.09e-9, "dense_merge_span": 6.23e-11, "dense": 1e-10, "call": 1e-5}
KINDS = {  # of --scaling: (algorithm, format, value dtype); those with COO are of Ok-Topk's figures
    "Dense": ("dense", "auto", None),
    "TopkA": ("allgather", "coo", None),
    "TopkDSA": ("sparcml:variant=dynamic", "coo", None),
    "gTopk": ("gtopk", "coo", None),
    "Ok-Topk": ("oktopk", "coo", None),
    "exact sum": ("auto", "auto", None),
    "top k of sum": ("auto:want=top_k_of_sum", "auto", None),
    "top k of sum, float16": ("auto:want=top_k_of_sum", "auto", "float16"),
}
SUPPORTS = ("random", "identical", "skewed", "peaked")  # peaked: random, and the largest values are in n / 16 places
LEAST = 300  # entries of a message
MOST_IN_CHUNKS = 64  # with more ranks, messages are not divided into chunks, of which there would be millions


def vector(support, rank, n, k):
    """Return the input of one rank."""
    rng = np.random.default_rng([rank, 1])
    if support == "skewed":
        indices = np.unique((n * rng.random(2 * k) ** 4).astype(np.int64))[:k]
    else:
        rng = np.random.default_rng(5) if support == "identical" else rng
        indices = np.sort(rng.choice(n, k, replace=False))
    values = np.random.default_rng([rank, 2]).standard_normal(indices.size).astype(np.float32)
    values[(support == "peaked") & (indices < n // 16)] *= 1000
    return SparseVector(indices, values, n)


def table1(options):
    """The papers' Table 1, counted: words received by the busiest rank + words for search and agreement."""
    n, k = options.n, round(options.density * options.n)

    def program(comm, support, algo):
        x = vector(support, comm.rank, n, k)
        traffic = sparsecoll.allreduce(comm, x, algorithm(algo), k=k, format="coo", return_reduction=True).traffic
        search = sum(traffic.phases[phase].words_received for phase in SEARCH if phase in traffic.phases)
        return traffic.total.words_received - search, search, traffic.total.messages_sent

    for name, P in product(options.algorithms, options.ranks):
        algo, words = ALGORITHMS[name]
        expected = " to ".join(f"{value:,.0f}" for value in np.atleast_1d(words(n, k, P)))
        row = {"algorithm": name, "P": P, "formula's words": expected}
        for support in ("random",) if name == "dense" else SUPPORTS[: 3 + ("oktopk" in name)]:
            done = sparsecoll.simulate(P, partial(program, support=support, algo=algo), NETWORKS["1 Gb/s"])
            moved, search, messages = np.max(done.results, axis=0).tolist()
            row |= {support: f"{moved:,.0f} + {search:,.0f}", f"{support}, ms": 1e3 * done.seconds}
            row["messages"] = int(messages)
        yield row


def scale_of(kind, n, k, P):
    """Return the divisor of n: messages keep LEAST entries, and all ranks handle at most 10^8 entries together."""
    total = estimates.fill_in(n, k, P)
    shortest = {"Dense": n / P, "TopkA": k, "gTopk": k}.get(kind, k / P)
    handled = P * {"Dense": 2 * n, "TopkA": k * P, "TopkDSA": total, "exact sum": total}.get(kind, k)
    return max(1, int(min(shortest, pipeline.CHUNK_BYTES / 5) / LEAST), int(np.ceil(handled / 1e8)))


def second_call(comm, kind, n, k):
    """Make two calls; return start and end of the second, words received, those of the search, and messages."""
    algo, form, value_dtype = KINDS[kind]
    kept, transport, x = algorithm(algo), comm.transport, drawn(n, k, comm.rank, count=1)()
    for _ in range(2):
        allgather(transport, np.zeros(1))
        before, start = transport.traffic.copy(), transport.now()
        if kept.takes_dense:  # as a gradient is: already dense
            kept(Channel(transport, n), DenseVector(x.to_dense()), k)
        else:
            sparsecoll.allreduce(comm, x, kept, k=k, format=form, value_dtype=value_dtype)
        moved, end = transport.traffic.since(before), transport.now()
    search = sum(moved.phases[p].words_received for p in ("agree", "repartition", "threshold") if p in moved.phases)
    return start, end, moved.total.words_received - search, search, moved.total.messages_sent


def scaling(options):
    """Yield modelled seconds, and words of the busiest rank without and with search; above 256 ranks on 1 Gb/s."""
    for model, P, network, kind in product(options.models, options.ranks, NETWORKS, KINDS):
        if P > 256 and network != "1 Gb/s":
            continue
        n, density = MODELS[model]
        scale, whole = scale_of(kind, n, int(n * density), P), pipeline.CHUNK_BYTES
        slow = Network(NETWORKS[network].alpha, NETWORKS[network].beta * scale)
        costs = Costs(**{name: cost * (1 if name == "call" else scale) for name, cost in COSTS.items()})
        program = partial(second_call, kind=kind, n=n // scale, k=max(1, round(n // scale * density)))
        pipeline.CHUNK_BYTES = max(whole // scale, 1) if P <= MOST_IN_CHUNKS else 1 << 60
        results = np.array(sparsecoll.simulate(P, program, slow, costs=costs).results)
        pipeline.CHUNK_BYTES = whole
        start, end, words, search, messages = results.max(axis=0).tolist()
        selecting = 0.0 if kind == "Dense" else COSTS["select"] * n
        row = {"model": model, "n": n, "density": density, "P": P, "network": network, "algo": kind, "scale": scale}
        row |= {"seconds": end - start + selecting, "select": selecting, "words": words * scale, "search": search}
        yield row | {"bytes_received": int(4 * scale * results[:, 2:4].sum(axis=1).max()), "messages": int(messages)}


def tables():
    """Return the table of docs/volume.md, and that of docs/benchmarks.md about many ranks on the slowest network."""
    counted = [row for row in load("volume")["rows"] if row["P"] == 64 and "oktopk:" not in row["algorithm"]]
    counted = harness.columns(counted, lambda head: head not in ("P", "messages", "peaked") and ", ms" not in head)
    lines = {}
    for row in load("scaling")["rows"]:
        if row["model"] == "BERT" and row["network"] == "1 Gb/s":
            line = lines.setdefault(row["algo"], {"ms": row["algo"]})
            line[f"P = {row['P']}"] = f"{1e3 * row['seconds']:,.0f}"
    scaled = f"{source('scaling')}\n\n### 1 Gb/s\n\n{markdown(lines.values())}"
    return {"volume.table1": f"{markdown(counted)}\n\n{source('volume')}", "volume.scaling": scaled}


def main():
    """Count or model, print and save."""
    some = {"algorithms": [*ALGORITHMS], "models": [*MODELS], "ranks": [4, 16, 64, 256]}
    options = harness.options(__doc__, n=10**6, density=0.005, scaling=False, **some)
    if options.scaling:
        harness.record(scaling(options), options, key=("model", "P", "network", "algo"))
    else:
        harness.record(table1(options), options, key=("algorithm", "P"))


if __name__ == "__main__":
    main()
