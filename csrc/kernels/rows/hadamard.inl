// The Walsh-Hadamard transform of the blocks of a row, in Sylvester's order. Contract:
// kernel_table.h.

// -1 in the lanes whose bit kDistance is set.
template <int kDistance>
inline F32x16 signs_of_bit() {
  return make_lanes([](int i) { return (i & kDistance) != 0 ? -1.0f : 1.0f; });
}

// The four stages of 16 neighbours: a + b in the lower lane of a pair, a - b in the upper one.
[[gnu::always_inline]] inline F32x16 hadamard_16(F32x16 v, const F32x16 (&signs)[4]) {
  v = fma(v, signs[0], swapped<1>(v));
  v = fma(v, signs[1], swapped<2>(v));
  v = fma(v, signs[2], swapped<4>(v));
  return fma(v, signs[3], swapped<8>(v));
}

// Stages of distances 16, 32, ... of one block, two at a time: a third of the trips to memory.
void hadamard_far_stages(float* y, int64_t block) {
  int64_t h = 16;
  for (; 4 * h <= block; h *= 4) {
    for (int64_t i = 0; i < block; i += 4 * h) {
      for (int64_t j = i; j < i + h; j += 16) {
        float *p0 = y + j, *p1 = p0 + h, *p2 = p1 + h, *p3 = p2 + h;
        const F32x16 a = load_n(p0, 16), b = load_n(p1, 16), c = load_n(p2, 16), d = load_n(p3, 16);
        const F32x16 ab = add(a, b), a_b = sub(a, b), cd = add(c, d), c_d = sub(c, d);
        store_n(p0, add(ab, cd), 16);
        store_n(p1, add(a_b, c_d), 16);
        store_n(p2, sub(ab, cd), 16);
        store_n(p3, sub(a_b, c_d), 16);
      }
    }
  }
  for (; 2 * h <= block; h *= 2) {
    for (int64_t i = 0; i < block; i += 2 * h) {
      for (int64_t j = i; j < i + h; j += 16) {
        const F32x16 a = load_n(y + j, 16), b = load_n(y + j + h, 16);
        store_n(y + j, add(a, b), 16);
        store_n(y + j + h, sub(a, b), 16);
      }
    }
  }
}

void hadamard_row(const float* x, const float* signs, int64_t n, int64_t block, bool signs_last,
                  float* y) {
  const F32x16 bits[4] = {signs_of_bit<1>(), signs_of_bit<2>(), signs_of_bit<4>(),
                          signs_of_bit<8>()};
  const F32x16 scale = set1(1.0f / __builtin_sqrtf(static_cast<float>(block)));
  for (int64_t from = 0; from < n; from += block) {
    for (int64_t i = from; i < from + block; i += 16) {
      F32x16 v = load_n(x + i, 16);
      if (!signs_last) v = mul(v, load_n(signs + i, 16));
      store_n(y + i, hadamard_16(v, bits), 16);
    }
    hadamard_far_stages(y + from, block);
    for (int64_t i = from; i < from + block; i += 16) {
      const F32x16 v = mul(load_n(y + i, 16), scale);
      store_n(y + i, signs_last ? mul(v, load_n(signs + i, 16)) : v, 16);
    }
  }
}
