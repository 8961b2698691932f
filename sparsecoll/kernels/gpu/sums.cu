// Sums of sparse vectors, into dense ones, and of rows of `width` values. FROM is the type code of the values added,
// VALUE that of the sums.

#ifndef FROM
#define FROM 4
#endif

// dense[index] += value, or -= with `minus`; every index occurs once and is below n.
extern "C" __global__ void scatter(BITS* dense, const INDEX* indices, const void* values, u64 count, u32 minus) {
  EVERY(i, count) {
    number own = FROM_BITS(dense[indices[i]]), value = ROUND(READ_AS(FROM, values, i));
    dense[indices[i]] = (BITS)TO_BITS(minus ? own - value : own + value);
  }
}

// The same into a window from `low` on, with a bit for every index that has an entry.
extern "C" __global__ void scatter_window(BITS* window, u32* bitmap, const INDEX* indices, u64 low, const void* values,
                                          u64 count) {
  EVERY(i, count) {
    u64 offset = (u64)indices[i] - low;
    window[offset] = (BITS)TO_BITS(FROM_BITS(window[offset]) + ROUND(READ_AS(FROM, values, i)));
    atomicOr(&bitmap[offset >> 5], 1u << (offset & 31));
  }
}

// Runs of equal indices in `sorted`; entry i is number order[i] of `values`. One thread adds each run from its first
// entry on. runs: where each run begins. `dense` null: sums start at +0 and go to out; else they are added to
// dense[index], unless the index is `length` or above.
extern "C" __global__ void add_runs(const INDEX* sorted, const i64* order, const void* values, u64 count,
                                    const i64* runs, u64 number_of_runs, BITS* dense, u64 length, BITS* out) {
  EVERY(r, number_of_runs) {
    u64 i = (u64)runs[r], stop = r + 1 < number_of_runs ? (u64)runs[r + 1] : count, index = sorted[i];
    if (dense && index >= length) continue;
    number sum = dense ? FROM_BITS(dense[index]) : 0;
    for (; i < stop; i++) sum = ROUND(sum + ROUND(READ_AS(FROM, values, order[i])));
    if (dense)
      dense[index] = (BITS)TO_BITS(sum);
    else
      out[r] = (BITS)TO_BITS(sum);
  }
}

// Into result[0]: ~(position of the first index that is not above its predecessor or is >= length), 0 if there is none.
extern "C" __global__ void first_unsorted(const INDEX* indices, u64 count, u64 length, u64* result) {
  EVERY(i, count) {
    INDEX here = indices[i];
    if (here >= length || (i && indices[i - 1] >= here)) atomicMax(result, ~i);
  }
}

// found[i] = 1 if the ascending `others` hold indices[i], else 0; the other way round with `invert`.
extern "C" __global__ void membership(const INDEX* indices, u64 count, const INDEX* others, u64 size, u32 invert,
                                      u8* found) {
  EVERY(i, count) {
    INDEX wanted = indices[i];
    u64 low = 0, high = size;
    while (low < high) {
      u64 middle = (low + high) >> 1;
      if (others[middle] < wanted)
        low = middle + 1;
      else
        high = middle;
    }
    found[i] = (low < size && others[low] == wanted) != invert;
  }
}

// out[u] = 0 + row order[starts[u]] + row order[starts[u] + 1] + ... up to starts[u + 1]; one thread adds one column.
extern "C" __global__ void sum_rows(const void* values, const i64* order, const i64* starts, u64 width, u64 count,
                                    BITS* out) {
  EVERY(i, count) {
    u64 u = i / width, j = i % width;
    number sum = 0;
    for (i64 c = starts[u]; c < starts[u + 1]; c++)
      sum = ROUND(sum + ROUND(READ_AS(FROM, values, (u64)order[c] * width + j)));
    out[i] = (BITS)TO_BITS(sum);
  }
}

// out[i] = values[positions[i]]
extern "C" __global__ void take_rows(const BITS* values, const i64* positions, u64 width, u64 count, BITS* out) {
  EVERY(i, count) out[i] = values[(u64)positions[i / width] * width + i % width];
}

// table[rows[i]] += values[i]; every row occurs once.
extern "C" __global__ void scatter_add_rows(BITS* table, const i64* rows, const void* values, u64 width, u64 count) {
  EVERY(i, count) {
    u64 at = (u64)rows[i / width] * width + i % width;
    table[at] = (BITS)TO_BITS(FROM_BITS(table[at]) + ROUND(READ_AS(FROM, values, i)));
  }
}
