// The epilogue of the ternary product: a block of exact sums scaled, rounded and stored. Contract:
// store_block in kernel_table.h.

template <StoreKind kKind, DType kType>
[[gnu::always_inline]] inline void store_lanes(F32x16 v, void* out, int64_t i, int64_t count) {
  if constexpr (kKind == StoreKind::kStore && kType == DType::kBF16) {
    store_bf16_n(static_cast<uint16_t*>(out) + i, v, count);
  } else if constexpr (kKind == StoreKind::kStore && kType == DType::kF16) {
    store_f16_n(static_cast<uint16_t*>(out) + i, v, count);
  } else {
    float* y = static_cast<float*>(out) + i;
    v = rounded_as<kType>(v);
    if constexpr (kKind == StoreKind::kAdd) v = add(load_n(y, count), v);
    store_n(y, v, count);
  }
}

// Rows of `out` lie far apart, so nothing but this asks for them; so many tokens ahead.
constexpr int64_t kStoreAhead = 8;

template <StoreKind kKind, DType kType, bool kRowScales>
void store_block_as(const EpilogueJob& job) {
  constexpr bool kHalves = kKind == StoreKind::kStore && kType != DType::kF32;
  const int64_t row_bytes = job.rows * (kHalves ? 2 : 4);
  for (int64_t m = 0; m < job.tokens; ++m) {
    const int32_t* sums = job.sums + m * job.sums_stride;
    char* out = static_cast<char*>(job.out) + m * job.out_stride_bytes;
    if (m + kStoreAhead < job.tokens) {
      const char* ahead = out + kStoreAhead * job.out_stride_bytes;
      for (int64_t i = 0; i < row_bytes; i += 64) prefetch(ahead + i);
    }
    const F32x16 xs = set1(job.x_scale[m]);
    const F32x16 one_scale = kRowScales ? xs : mul(set1(job.w_scale[0]), xs);
    const auto lanes = [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
      const F32x16 scale = kRowScales ? mul(load_n(job.w_scale + i, count), xs) : one_scale;
      F32x16 v = mul(from_i32_n(sums + i, count), scale);
      if (job.bias != nullptr) v = add(v, load_n(job.bias + i, count));
      store_lanes<kKind, kType>(v, out, i, count);
    };
    int64_t i = 0;
    for (; i + 16 <= job.rows; i += 16) lanes(i, 16);
    if (i < job.rows) lanes(i, job.rows - i);
  }
}

void store_sums(const EpilogueJob& job) {
  for (int64_t m = 0; m < job.tokens; ++m) {
    auto* out = reinterpret_cast<int32_t*>(static_cast<char*>(job.out) + m * job.out_stride_bytes);
    for (int64_t i = 0; i < job.rows; ++i) out[i] = job.sums[m * job.sums_stride + i];
  }
}

template <StoreKind kKind, DType kType>
void store_block_scaled(const EpilogueJob& job) {
  if (job.w_scale_step != 0) return store_block_as<kKind, kType, true>(job);
  store_block_as<kKind, kType, false>(job);
}

template <StoreKind kKind>
void store_block_typed(const EpilogueJob& job) {
  if (job.type == DType::kBF16) return store_block_scaled<kKind, DType::kBF16>(job);
  if (job.type == DType::kF16) return store_block_scaled<kKind, DType::kF16>(job);
  store_block_scaled<kKind, DType::kF32>(job);
}

void store_block(const EpilogueJob& job) {
  if (job.rows <= 0) return;  // no scale to read
  switch (job.kind) {
    case StoreKind::kSums:
      return store_sums(job);
    case StoreKind::kStore:
      return store_block_typed<StoreKind::kStore>(job);
    case StoreKind::kRound:
      return store_block_typed<StoreKind::kRound>(job);
    case StoreKind::kAdd:
      return store_block_typed<StoreKind::kAdd>(job);
  }
}
