// Gated DeltaNet over the float primitives: the causal convolution, the gates, and the delta rule
// on one slab of columns of a head's state. Contracts, including the order of sums: kernel_table.h.

void conv_silu_row(const float* const* x, int64_t taps, const float* weight, int64_t stride,
                   int64_t n, float* y) {
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    F32x16 sum = mul(load_n(weight + i, count), load_n(x[0] + i, count));
    for (int64_t j = 1; j < taps; ++j)
      sum = fma(load_n(weight + j * stride + i, count), load_n(x[j] + i, count), sum);
    const F32x16 denominator = add(set1(1.0f), exp_f32(sub(zero(), sum)));
    store_n(y + i, div(sum, denominator), count);
  });
}

// ln(1 + t) for t in [0, 1]: 2 atanh(s), s = t / (2 + t) <= 1/3, by eight terms of its series.
inline F32x16 log1p_of_unit(F32x16 t) {
  const F32x16 s = div(t, add(set1(2.0f), t)), squared = mul(s, s);
  F32x16 p = set1(1.0f / 15.0f);
  p = fma(p, squared, set1(1.0f / 13.0f));
  p = fma(p, squared, set1(1.0f / 11.0f));
  p = fma(p, squared, set1(1.0f / 9.0f));
  p = fma(p, squared, set1(1.0f / 7.0f));
  p = fma(p, squared, set1(1.0f / 5.0f));
  p = fma(p, squared, set1(1.0f / 3.0f));
  p = fma(p, squared, set1(1.0f));
  return mul(add(s, s), p);
}

void delta_gates_row(const float* a, const float* b, const float* a_log, const float* dt_bias,
                     int64_t n, float* decay, float* beta) {
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    const F32x16 x = add(load_n(a + i, count), load_n(dt_bias + i, count)), one = set1(1.0f);
    const F32x16 size = max(sub(zero(), x), x);
    const F32x16 softplus = add(max(zero(), x), log1p_of_unit(exp_f32(sub(zero(), size))));
    const F32x16 rate = exp_f32(load_n(a_log + i, count));
    store_n(decay + i, exp_f32(sub(zero(), mul(rate, softplus))), count);
    store_n(beta + i, div(one, add(one, exp_f32(sub(zero(), load_n(b + i, count))))), count);
  });
}

// 16 V columns of a slab; columns do not meet, so V changes nothing but time.
template <int V>
struct DeltaColumns {
  F32x16 at[V];

  template <class F>
  [[gnu::always_inline]] static DeltaColumns make(const F& f) {
    DeltaColumns x;
    for (int v = 0; v < V; ++v) x.at[v] = f(v);
    return x;
  }
  [[gnu::always_inline]] static DeltaColumns load(const float* p) {
    return make([&](int v) BITNET_INLINE_LAMBDA { return load_n(p + 16 * v, 16); });
  }
  [[gnu::always_inline]] void store(float* p) const {
    for (int v = 0; v < V; ++v) store_n(p + 16 * v, at[v], 16);
  }
};

// S = decay * S + k e^T.
template <int V>
[[gnu::always_inline]] inline DeltaColumns<V> delta_updated(const float* state, F32x16 k,
                                                            const DeltaColumns<V>& e,
                                                            F32x16 decay) {
  return DeltaColumns<V>::make([&](int v) BITNET_INLINE_LAMBDA {
    return fma(k, e.at[v], mul(decay, load_n(state + 16 * v, 16)));
  });
}

// S^T k.
template <int V>
DeltaColumns<V> delta_predict(const float* state, const float* k, int64_t key_dim) {
  auto sum = DeltaColumns<V>::make([](int) BITNET_INLINE_LAMBDA { return zero(); });
  for (int64_t i = 0; i < key_dim; ++i, state += kStateColumns) {
    const F32x16 ki = set1(k[i]);
    for (int v = 0; v < V; ++v) sum.at[v] = fma(ki, load_n(state + 16 * v, 16), sum.at[v]);
  }
  return sum;
}

// One token's update; what it reads, S^T q, is written to `out`. Returns S^T of the next token's k
// (null: there is none).
template <int V, bool kNext>
DeltaColumns<V> delta_step(float* state, const float* k, const float* q, const float* next,
                           const DeltaColumns<V>& e, float decay, int64_t key_dim, float* out) {
  auto read = DeltaColumns<V>::make([](int) BITNET_INLINE_LAMBDA { return zero(); });
  auto predicted = read;
  const F32x16 kept = set1(decay);
  for (int64_t i = 0; i < key_dim; ++i, state += kStateColumns) {
    const auto s = delta_updated<V>(state, set1(k[i]), e, kept);
    s.store(state);
    const F32x16 qi = set1(q[i]);
    for (int v = 0; v < V; ++v) read.at[v] = fma(qi, s.at[v], read.at[v]);
    if constexpr (kNext) {
      const F32x16 ki = set1(next[i]);
      for (int v = 0; v < V; ++v) predicted.at[v] = fma(ki, s.at[v], predicted.at[v]);
    }
  }
  read.store(out);
  return predicted;
}

template <int V>
void delta_rule_columns(const DeltaJob& job, int64_t column) {
  float* state = job.state + column;
  auto predicted = delta_predict<V>(state, job.k, job.key_dim);
  for (int64_t t = 0; t < job.tokens; ++t) {
    const float *k = job.k + t * job.row_stride, *q = job.q + t * job.row_stride;
    const float* v = job.v + t * job.row_stride + column;
    const float decay = job.decay[t * job.gate_stride];
    const F32x16 kept = set1(decay), beta = set1(job.beta[t * job.gate_stride]);
    const auto e = DeltaColumns<V>::make([&](int i) BITNET_INLINE_LAMBDA {
      return mul(beta, sub(load_n(v + 16 * i, 16), mul(kept, predicted.at[i])));
    });
    if (job.errors != nullptr) e.store(job.errors + t * job.error_stride + column);
    float* out = job.out + t * job.out_stride + column;
    if (t + 1 < job.tokens) {
      predicted = delta_step<V, true>(state, k, q, k + job.row_stride, e, decay, job.key_dim, out);
    } else {
      delta_step<V, false>(state, k, q, nullptr, e, decay, job.key_dim, out);
    }
  }
}

void delta_rule(const DeltaJob& job) {
  if (job.tokens == 0) return;
  for (int64_t column = 0; column < kStateColumns; column += 16 * kDeltaVectors)
    delta_rule_columns<kDeltaVectors>(job, column);
}

void delta_replay(const float* k, const float* errors, float decay, int64_t key_dim, float* state) {
  const auto e = DeltaColumns<2>::load(errors);
  static_assert(kStateColumns == 32);
  const F32x16 kept = set1(decay);
  for (int64_t i = 0; i < key_dim; ++i, state += kStateColumns)
    delta_updated<2>(state, set1(k[i]), e, kept).store(state);
}
