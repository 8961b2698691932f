// Rows of values, `width` of them each. FROM is the type code of the values added, VALUE that of the sums.

#ifndef FROM
#define FROM 4
#endif

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
