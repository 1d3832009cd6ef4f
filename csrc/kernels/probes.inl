// The limits of the machine, for benchmarks: the speed of reading memory and
// of the int8 unit. Contracts: probe_read and probe_int8_peak in
// kernel_table.h.

// S sequential streams of `part` bytes, each from its own part of the data, two cache lines at a
// time.
template <int S, bool kPrefetch>
uint64_t read_streams(const uint8_t* data, int64_t part, int64_t distance) {
  constexpr int64_t kStep = 128;
  LineXor a = LineXor{}, b = LineXor{};
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
  for (int j = 0; j < kChains; ++j) p[j] = Partial{};
  for (int64_t i = 0; i < iterations; ++i) dot_all(p, c, a);
  Acc acc = Acc{};
#pragma GCC unroll 12  // an index that is not constant would put the accumulators on the stack
  for (int j = 0; j < kChains; ++j) acc = widen(acc, p[j]);
  *sink = reduce(acc);
  return iterations * kChains * kStepBlocks * layout::kFieldWeights;
}

// ---- the matrix unit ----------------------------------------------------------------------------
// What a product of tiles can reach at best.  Operands come from L1, one tile load a product as in
// any 2 x 2 blocking, for a loop on registers alone is 20 % above everything that multiplies
// different data; and they are no zeros, on which the clock is higher.

constexpr int64_t kPeakSteps = 4;  // 16 KiB of operands: a third of L1

// Byte i of the signed operands is i * 167 + i / 256 * 29, of the unsigned ones a code of a 2-bit
// field as the kernels mask it: (i * 73 / 16 % 3) * 4^(i / 2048), all modulo 256.
struct alignas(64) PeakData {
  uint8_t a[kPeakSteps * 2 * kOperandBytes], b[kPeakSteps * 2 * kOperandBytes];
};

constexpr PeakData peak_data() {
  PeakData d{};
  for (int64_t i = 0; i < kPeakSteps * 2 * kOperandBytes; ++i) {
    d.a[i] = static_cast<uint8_t>(i * 167 + i / 256 * 29);
    d.b[i] = static_cast<uint8_t>((i * 73 / 16 % 3) << (2 * (i / 2048)));
  }
  return d;
}

// The sum of all elements of four accumulator tiles, modulo 2^32.
inline int32_t sum_of_tiles(const int32_t (&tiles)[4][256]) {
  uint32_t sum = 0;
  for (const auto& tile : tiles) {
    for (const int32_t value : tile) sum += static_cast<uint32_t>(value);
  }
  return static_cast<int32_t>(sum);
}

// An iteration multiplies every step once: tiles 2 s and 2 s + 1 of a by those of b.  *sink is the
// sum of all results, modulo 2^32.
template <class U>
int64_t probe_matrix_peak(int64_t iterations, int32_t* sink) {
  static constexpr PeakData kData = peak_data();
  U::configure(typename U::Config{});
  U::template zero<0>();
  U::template zero<1>();
  U::template zero<2>();
  U::template zero<3>();
  for (int64_t i = 0; i < iterations; ++i) {
    for (int64_t s = 0; s < kPeakSteps; ++s) {
      const uint8_t* a = kData.a + s * 2 * kOperandBytes;
      const uint8_t* b = kData.b + s * 2 * kOperandBytes;
      U::template load<4>(a, 64);
      U::template load<6>(b, 64);
      U::template multiply<0, 4, 6>();
      U::template load<7>(b + kOperandBytes, 64);
      U::template multiply<1, 4, 7>();
      U::template load<5>(a + kOperandBytes, 64);
      U::template multiply<2, 5, 6>();
      U::template multiply<3, 5, 7>();
    }
  }
  alignas(64) int32_t sums[4][256];
  U::template store<0>(sums[0], 64);
  U::template store<1>(sums[1], 64);
  U::template store<2>(sums[2], 64);
  U::template store<3>(sums[3], 64);
  U::release();
  *sink = sum_of_tiles(sums);
  return iterations * kPeakSteps * 4 * 16 * 16 * 64;
}

// The unit that large products run on.
int64_t probe_int8_peak(int64_t iterations, int32_t* sink) {
  if constexpr (kHasMatrixUnit) {
    return probe_matrix_peak<MatrixUnit>(iterations, sink);
  } else {
    return probe_vector_peak(iterations, sink);
  }
}
