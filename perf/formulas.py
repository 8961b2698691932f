"""Each algorithm's volume by formula: words (4 bytes) that a rank receives, in COO with float32 and 32-bit indices."""

import math

from sparsecoll.algorithms.primitives.estimates import rounds


def dense_words(n: int, P: int) -> float:
    """2n(P-1)/P: reduce-scatter and allgather (Ok-Topk, Table 1, Dense)."""
    return 2 * n * (P - 1) / P


def allgather_words(k: int, P: int) -> float:
    """2k(P-1): every rank receives every other rank's k entries (Ok-Topk, Table 1, TopkA)."""
    return 2 * k * (P - 1)


def oktopk_words(k: int, P: int) -> tuple[float, float]:
    """(lower, upper) = (2k(P-1)/P, 6k(P-1)/P) (Ok-Topk, Theorem 3.1 and equation (3))."""
    return 2 * k * (P - 1) / P, 6 * k * (P - 1) / P


def gtopk_words(k: int, P: int) -> float:
    """4k log2 P (Ok-Topk, Table 1, gTopk): 2k a level into and out of the root."""
    return 4 * k * rounds(P)


def sparcml_words(n: int, k: int, P: int) -> tuple[float, float]:
    """(lower, upper) of split and dynamic gather: (4k(P-1)/P, (2k + n)(P-1)/P) (Ok-Topk, Table 1, TopkDSA)."""
    return min(4 * k, 2 * k + n) * (P - 1) / P, (2 * k + n) * (P - 1) / P


def densestream_words(k: int, P: int) -> tuple[float, float]:
    """(lower, upper) of equation (6) of DenseStream, in words of COO (2 an entry): 2 * 2k(P-1)/P and more."""
    return 4 * k * (P - 1) / P, 2 * k * ((math.log2(P) / 2 + 1) * P - 1)


def spardl_words(k: int, P: int) -> float:
    """4k(P-1)/P: two steps of P - 1 blocks of k/P entries (SparDL, section III, one team)."""
    return 4 * k * (P - 1) / P


def cltk_words(k: int, P: int) -> float:
    """k words of indices from the leader, and 2k(P-1)/P of values (ScaleCom, section 2.1)."""
    return k + 2 * k * (P - 1) / P


def lowbit_words(n: int, P: int, bits: int, bucket: int = 512) -> float:
    """2n(P-1)/P times (bits + 32/bucket)/32: both phases of a dense sum, in codes and scales."""
    return dense_words(n, P) * (bits + 32 / bucket) / 32


def row_sums(r: float, u: float, P: int) -> tuple[float, float]:
    """(r(P-1), (r + u)(P-1)/P): rows of d values and a coded index, gathered; or summed by owners, u sums gathered."""
    return r * (P - 1), (r + u) * (P - 1) / P


def chunktopk_words(n: int, P: int, density: float = 1 / 64) -> tuple[float, float, float]:
    """(gathered, by owners, requantized): 9.6 bits an entry at 1/64; of a sum 8.1 and the entropy of its gaps."""
    m, share = n * density * (3.6 - math.log2(density)) / 32, 1 - (1 - density) ** P
    gaps = max(share, -share * math.log2(share) - (1 - share) * math.log2(1 - share))
    return (P - 1) * m, (P - 1) / P * (m + n * (8.1 * share + gaps) / 32), 2 * (P - 1) / P * m
