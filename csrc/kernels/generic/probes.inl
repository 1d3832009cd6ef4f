// The limits of the machine, for benchmarks: how fast memory can be read, how fast the int8 unit
// multiplies.  Included inside an ISA's anonymous namespace; never mentions an ISA.  See probe_read
// and probe_int8_peak in kernel_table.h for the contract.

// S sequential streams of `part` bytes, each from its own part of the data, in steps of two lines.
template <int S, bool kPrefetch>
uint64_t read_streams(const uint8_t* data, int64_t part, int64_t distance) {
  constexpr int64_t kStep = 128;
  LineXor a = line_zero(), b = line_zero();
  for (int64_t i = 0; i < part; i += kStep) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      const uint8_t* p = data + s * part + i;
      if constexpr (kPrefetch) {
        prefetch(p + distance);
        prefetch(p + distance + kStep / 2);
      }
      a = xor_line(a, p);
      b = xor_line(b, p + kStep / 2);
    }
  }
  return reduce_lines(a, b);
}

template <int S>
uint64_t read_all(const uint8_t* data, int64_t n_bytes, int64_t distance) {
  const int64_t part = n_bytes / (S * 128) * 128;
  const uint64_t body = distance > 0 ? read_streams<S, true>(data, part, distance)
                                     : read_streams<S, false>(data, part, 0);
  // what the streams leave over, fewer than S steps
  return body ^ read_streams<1, false>(data + S * part, (n_bytes - S * part) / 128 * 128, 0);
}

// No one form of reading is the fastest everywhere: one CPU wants a prefetch far ahead, another
// several streams and no prefetch at all.  The caller tries them and takes the best as the limit.
uint64_t probe_read(const uint8_t* data, int64_t n_bytes, int64_t streams, int64_t distance) {
  switch (streams) {
    case 2:
      return read_all<2>(data, n_bytes, distance);
    case 4:
      return read_all<4>(data, n_bytes, distance);
    default:
      return read_all<1>(data, n_bytes, distance);
  }
}

// Adds the product of c and a to N independent sums.  Where `dot` is a product and a sum, a run of
// products and then a run of sums: on Zen 3 that issues 7 % faster than the two alternating (1.71
// against 1.60 products a cycle), and a limit has to be the best that the machine does.
template <int N, class C, class A>
[[gnu::always_inline]] inline void dot_all(Partial (&p)[N], C c, A& a) {
  if constexpr (kDotInTwoSteps) {
    Partial products[N];
#pragma GCC unroll 12
    for (int j = 0; j < N; ++j) {
      renew(a);  // else one product would do for all of them
      products[j] = dot_product(c, a);
      pin(products[j]);
    }
#pragma GCC unroll 12
    for (int j = 0; j < N; ++j) add_product(p[j], products[j]);
  } else {
#pragma GCC unroll 12
    for (int j = 0; j < N; ++j) {
      renew(a);
      p[j] = dot(p[j], c, a);
      pin(p[j]);
    }
  }
}

// Enough independent sums to hide the latency of `dot`, few enough that everything stays in
// registers.
[[maybe_unused]] int64_t probe_vector_peak(int64_t iterations, int32_t* sink) {
  constexpr int kChains = kDotInTwoSteps ? 6 : 12;
  uint8_t bytes[64] = {};
  int8_t activations[512] = {};
  for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i * 37);
  for (int i = 0; i < 512; ++i) activations[i] = static_cast<int8_t>((i * 5) % 3 - 1);
  const Codes c = codes<0>(load_raw(bytes));
  Activations a = load_x<0>(activations);
  Partial p[kChains];
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) p[j] = partial_zero();
  for (int64_t i = 0; i < iterations; ++i) dot_all(p, c, a);
  Acc acc = acc_zero();
#pragma GCC unroll 12  // an index that is not constant would put the accumulators on the stack
  for (int j = 0; j < kChains; ++j) acc = widen(acc, p[j]);
  *sink = reduce(acc);
  return iterations * kChains * kUnitBlocks * layout::kFieldWeights;
}

// The unit that large products run on.
int64_t probe_int8_peak(int64_t iterations, int32_t* sink) {
#if defined(BITNET_MATRIX_PEAK)
  return probe_matrix_peak(iterations, sink);
#else
  return probe_vector_peak(iterations, sink);
#endif
}
