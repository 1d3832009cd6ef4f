// One chunk of attention: which file serves which cache. And what follows a chunk: the states of
// two chunks merged, and the result of the last one. Contracts: kernel_table.h.

template <DType kType>
void attend_floats(const AttentionChunk& c, float* scratch, float* states) {
  const int64_t rows = c.rows < kBlockMinRows ? 0 : c.rows / kBlockRows * kBlockRows;
  if (rows > 0) attend_block<kType>(c, rows, scratch, states);
  attend_few<kType>(c, rows, scratch, states);
}

void attend_chunk(const AttentionChunk& chunk, float* scratch, float* states) {
  switch (chunk.type) {
    case DType::kF32:
      return attend_floats<DType::kF32>(chunk, scratch, states);
    case DType::kF16:
      return attend_floats<DType::kF16>(chunk, scratch, states);
    case DType::kF8E4M3:
      return attend_floats<DType::kF8E4M3>(chunk, scratch, states);
    case DType::kF8E5M2:
      return attend_floats<DType::kF8E5M2>(chunk, scratch, states);
    case DType::kBF16:
      return attend_bf16(chunk, scratch, states);
    case DType::kInt8:
      if (chunk.layout == CacheLayout::kPanels) return attend_int8_panels(chunk, states);
      return attend_int8_rows(chunk, states);
  }
}

// What the states of up to eight rows before a chunk, and those of the chunk, are multiplied by.
struct MergeFactors {
  alignas(64) float of[16];  // keep of row r at r, take at 8 + r
};

[[gnu::always_inline]] inline MergeFactors merge_factors(int64_t rows, int64_t stride,
                                                         const float* before, const float* now) {
  MergeFactors factors = {};
  for (int64_t r = 0; r < rows; ++r, before += stride, now += stride) {
    const float top = *before > *now ? *before : *now;
    const float shift = top == -__builtin_inff() ? 0.0f : top;
    factors.of[r] = *before - shift;
    factors.of[8 + r] = *now - shift;
  }
  store_n(factors.of, exp_f32(load_n(factors.of, 16)), 16);
  return factors;
}

void merge_attention(int64_t rows, int64_t dim, const float* later, float* states) {
  const int64_t padded = attention_padded(dim), stride = attention_state_floats(dim);
  MergeFactors factors;
  for (int64_t r = 0; r < rows; ++r, later += stride, states += stride) {
    if (r % 8 == 0)
      factors = merge_factors(rows - r < 8 ? rows - r : 8, stride, states + padded, later + padded);
    const F32x16 keep = set1(factors.of[r % 8]), take = set1(factors.of[8 + r % 8]);
    const float before = states[padded], now = later[padded];
    const F32x16 sum = mul(set1(states[padded + 1]), keep);
    states[padded] = before > now ? before : now;
    store_n(states + padded + 1, fma(set1(later[padded + 1]), take, sum), 1);
    for (int64_t i = 0; i < padded; i += 16) {
      const F32x16 kept = mul(load_n(states + i, 16), keep);
      store_n(states + i, fma(load_n(later + i, 16), take, kept), 16);
    }
  }
}

void finish_attention(int64_t dim, const float* state, float* out) {
  const F32x16 sum = set1(state[attention_padded(dim) + 1]);
  for (int64_t i = 0; i < dim; i += 16) {
    store_n(out + i, div(load_n(state + i, 16), sum), dim - i);
  }
}
