// The list of products of this ISA: what each row takes, when it is the usual choice, how it wants
// its work cut, and how it runs. Contract: products.h. To add a product: its file, its rows'
// functions in a struct here, its line in kProducts.

// ---- what rows share ----------------------------------------------------------------------------

// Calls f<D1, DN, DP>() with the decoders of a format: for one token or a matrix unit, for several
// tokens, and to memory.
template <class F>
inline void with_decoders(layout::WeightFormat format, const F& f) {
  if (format == layout::WeightFormat::kBase3)
    return f.template operator()<Base3, Several::Thirds, Several::ThirdsDigits>();
  f.template operator()<TwoBit, Several::TwoBits, Several::TwoBitsPlain>();
}

// f<kPlanes, S>() of a job with scales of groups of type S.
template <class F>
inline void with_scales(const ProductJob& job, const F& f) {
  if (job.scale_type == DType::kF16) {
    if (job.planes == 2) return f.template operator()<2, uint16_t>();
    return f.template operator()<1, uint16_t>();
  }
  if (job.planes == 2) return f.template operator()<2, float>();
  f.template operator()<1, float>();
}

constexpr int64_t tile_rows_of(layout::WeightFormat format) {
  return (format == layout::WeightFormat::kBase3 ? 5 : 4) * kTileLanes;
}

// Values begin with 0.
inline void begin_values(const ProductJob& job) {
  const int64_t rows = job.blocks * tile_rows_of(job.format);
  for (int64_t m = 0; m < job.tokens && !job.add; ++m) {
    for (int64_t i = 0; i < rows; ++i) job.values[m * job.out_stride + i] = 0.0f;
  }
}

// A row A of the list that makes sums of tiles, or values of groups: A::sums<D1, DN, DP>(job),
// A::values<D1, DN, DP, kPlanes, S>(job).
template <class A>
void run_tiles(const ProductJob& job, const EpilogueJob* epilogue) {
  with_decoders(job.format, [&]<class D1, class DN, class DP>() {
    if (!job.grouped()) return A::template sums<D1, DN, DP>(job);
    begin_values(job);
    with_scales(job,
                [&]<int kPlanes, class S>() { A::template values<D1, DN, DP, kPlanes, S>(job); });
  });
  if (epilogue != nullptr) store_block(*epilogue);
}

// For vector units: tokens in row-major order, sums or values of a call in L1. A claim is a row of
// tiles with all blocks of tokens.
inline ProductBlocking vector_blocking(const ProductShape& shape) {
  if (shape.row_major()) return {};
  return {.min_rows = 4 * kTileLanes};
}

// ---- the rows -----------------------------------------------------------------------------------

// A matrix unit wants its tokens in tiles and stores its results itself. Each claim costs it a
// start, so claims are large.
template <class U>
struct Matrix {
  static constexpr int64_t kMinSteps = kDecodeAhead * kOperandSteps;

  static bool takes(const ProductShape& s) {
    return s.tiles() && (s.grouped || (s.k + 63) / 64 * kOperandSteps >= kMinSteps);
  }
  static bool usual(const ProductShape& s) {
    return takes(s) && s.tokens * s.planes >= U::kFromTokens;
  }
  static ProductBlocking blocking(const ProductShape& s) {
    if (s.row_major()) return {.claim_fraction = 3};
    return {.tokens = kMatrixChunk,
            .sums = kMatrixChunk * 64,
            .min_rows = kMatrixMinRows,
            .claim_fraction = 3,
            .token_tile = kMatrixTokens,
            .tokens_outermost = true,
            .kernel_stores = true};
  }
  static void run(const ProductJob& job, const EpilogueJob* epilogue) {
    with_decoders(job.format, [&]<class D, class, class>() {
      if (!job.grouped()) return matrix_product<U, D>(job, epilogue);
      begin_values(job);
      with_scales(job, [&]<int kPlanes, class S>() { tiles_groups_matrix<U, D, kPlanes, S>(job); });
    });
  }
};

// One token, or one plane of one.
struct Gemv {
  static bool takes(const ProductShape& s) { return s.tiles() && s.tokens * s.planes == 1; }
  static bool usual(const ProductShape& s) { return takes(s); }
  template <class D, class, class>
  static void sums(const ProductJob& job) {
    if constexpr (kTileStreams > 0) {
      tiles_in_streams<D, kTileStreams>(job);
    } else {
      tiles_direct<D, 1>(job, 0);
    }
  }
  template <class D, class, class, int kPlanes, class S>
  static void values(const ProductJob& job) {
    if constexpr (kPlanes == 1) tiles_groups<D, 1, 1, S>(job, 0);
  }
};

// Only for decoders to memory that this ISA has for the format.
constexpr bool kHasTwoBitPanel = HasPanel<Several::TwoBitsPlain>;
constexpr bool kHasBase3Panel = HasPanel<Several::ThirdsDigits>;

struct InPanel {
  static bool takes(const ProductShape& s) {
    return s.format == layout::WeightFormat::kBase3
               ? kHasBase3Panel
               : s.format == layout::WeightFormat::kTwoBit && kHasTwoBitPanel;
  }
  static bool usual(const ProductShape& s) {
    bool usual = false;
    if (takes(s)) {
      with_decoders(s.format, [&]<class, class, class D>() {
        if constexpr (HasPanel<D>) usual = s.tokens * s.planes >= D::kPanelFrom;
      });
    }
    return usual;
  }
  template <class, class, class D>
  static void sums(const ProductJob& job) {
    if constexpr (HasPanel<D>) tiles_panel<D>(job);
  }
  template <class, class, class D, int kPlanes, class S>
  static void values(const ProductJob& job) {
    if constexpr (HasPanel<D>) tiles_groups_panel<D, kPlanes, S>(job);
  }
};

// A decoder's other form, for a format that has one: see HasWide.
template <bool kWide>
struct Direct {
  static bool takes(const ProductShape& s) {
    if (!kWide) return s.tiles();
    return s.format == layout::WeightFormat::kBase3 && s.tokens * s.planes >= kWideFrom<Base3>;
  }
  static bool usual(const ProductShape& s) { return takes(s); }
  template <class, class D, class>
  static void sums(const ProductJob& job) {
    for_token_groups<D::kTokens, kTokensTogether<D>>(job.tokens, [&]<int T>(int64_t token) {
      if constexpr (kWide && HasWide<D, T>) {
        tiles_direct<typename WideOr<D>::Type, T>(job, token);
      } else {
        tiles_direct<D, T>(job, token);
      }
    });
  }
  template <class, class D, class, int kPlanes, class S>
  static void values(const ProductJob& job) {
    constexpr int kTokens = D::kTokens < kPlanes ? 1 : D::kTokens / kPlanes;
    constexpr int kTogether = kPlanes == 1 ? kTokensTogether<D> : 1;
    for_token_groups<kTokens, kTogether>(job.tokens, [&]<int T>(int64_t token) {
      if constexpr (kWide && HasWide<D, T * kPlanes>) {
        tiles_groups<typename WideOr<D>::Type, T, kPlanes, S>(job, token);
      } else {
        tiles_groups<D, T, kPlanes, S>(job, token);
      }
    });
  }
};

// Canonical rows, all that takes them.
struct CanonicalRows {
  static bool takes(const ProductShape& s) { return !s.tiles(); }
  static bool usual(const ProductShape&) { return true; }
  static void run(const ProductJob& job, const EpilogueJob* epilogue) {
    const int64_t row_bytes = job.k_steps;  // a byte has four weights
    if (job.tokens == 1 && kGemvStreams) {
      rows_in_streams<kGemvRows>(job.weights, row_bytes, job.blocks, job.x, *job.x_sum,
                                 job.prefetch_bytes, job.sums);
    } else if (job.tokens == 1) {
      rows_at_tokens<true, kGemvRows, 1>(job.weights, row_bytes, job.blocks, job.x, job.x_stride,
                                         job.x_sum, job.prefetch_bytes, job.sums, job.out_stride);
    } else {
      for (int64_t t = 0; t < job.tokens; t += kTokenBlock) {
        const int64_t count = job.tokens - t < kTokenBlock ? job.tokens - t : kTokenBlock;
        token_block(job.weights, row_bytes, job.blocks, job.x + t * job.x_stride, job.x_stride,
                    job.x_sum + t, count, job.prefetch_bytes, job.sums + t * job.out_stride,
                    job.out_stride);
      }
    }
    if (epilogue != nullptr) store_block(*epilogue);
  }
};

// The tokens that tables leave over, by the usual row of those that multiply.
void multiply_tiles(const ProductJob& job);

// Of a rest: a few tokens, or a small job, in pieces whose sums stay in L1.
inline void tiles_in_pieces(const ProductJob& job, const EpilogueJob& epilogue, int64_t token) {
  constexpr int64_t kSums = 64 * 80;
  alignas(64) int32_t sums[kSums];
  const int64_t tile_rows = tile_rows_of(job.format);
  for (int64_t t = token; t < job.tokens; t += kPanelTokens) {
    const int64_t tokens = job.tokens - t < kPanelTokens ? job.tokens - t : kPanelTokens;
    const int64_t once = kSums / (tokens * tile_rows);
    for (int64_t i = 0; i < job.blocks; i += once) {
      ProductJob piece = job;
      piece.weights += i * job.block_bytes;
      piece.blocks = job.blocks - i < once ? job.blocks - i : once;
      piece.x += t * job.x_stride;
      piece.x_sum += t;
      piece.tokens = tokens;
      piece.sums = sums;
      piece.out_stride = piece.blocks * tile_rows;
      multiply_tiles(piece);
      EpilogueJob part = epilogue_part(epilogue, i * tile_rows, piece.out_stride, t, tokens);
      part.sums = sums;
      part.sums_stride = piece.out_stride;
      store_block(part);
    }
  }
}

// Tables want many rows for each building, and all of them before the next tokens.
template <class U>
struct Tables {
  static bool takes(const ProductShape& s) {
    return s.scratch && s.tiles() && s.planes == 1 && (!s.grouped || s.blocked);
  }
  static bool usual(const ProductShape& s) {
    return takes(s) && s.tokens >= U::kFromTokens && s.rows() >= U::kFromRows;
  }
  static ProductBlocking blocking(const ProductShape& s) {
    return blocking_by_tables<U>(s.tokens, s.grouped);
  }
  // D<V>: the rows' indices, Steps<V>: k-steps for multipliers.
  template <template <class> class D, template <class> class Steps>
  static int64_t sums(const ProductJob& job, const EpilogueJob& epilogue) {
    const TableInput all{job.weights, job.block_bytes, job.k_steps, job.x, job.x_stride, 0, {},
                         {},          job.scratch};
    return for_table_parts<U>(
        all, job.tokens, job.blocks, tile_rows_of(job.format), [&]<class V>(const TableInput& in) {
          table_blocks<V, D<V>, Steps<V>>(in, WholeSums<V>{epilogue, job.k_steps, job.x_sum});
        });
  }
  static void run(const ProductJob& job, const EpilogueJob* epilogue) {
    if (job.grouped()) {
      const ProductJob rest = job.add ? job : groups_by_tables<U>(job);
      return rest.tokens == 0 ? void() : multiply_tiles(rest);
    }
    // sums that are wanted as they are
    const EpilogueJob plain{.sums = nullptr,
                            .sums_stride = 0,
                            .rows = job.blocks * tile_rows_of(job.format),
                            .tokens = job.tokens,
                            .w_scale = nullptr,
                            .w_scale_step = 0,
                            .x_scale = nullptr,
                            .bias = nullptr,
                            .kind = StoreKind::kSums,
                            .type = DType::kF32,
                            .out = job.sums,
                            .out_stride_bytes = job.out_stride * 4};
    const EpilogueJob& to = epilogue == nullptr ? plain : *epilogue;
    const int64_t done = job.format == layout::WeightFormat::kBase3
                             ? sums<LinesOfFive, StepsOfFive>(job, to)
                             : sums<LinesOfFour, StepsOfFour>(job, to);
    if (done < job.tokens) tiles_in_pieces(job, to, done);
  }
};

// ---- the list -----------------------------------------------------------------------------------

template <class A>
constexpr ProductAlgorithm tiles_row(const char* name) {
  return {name, A::takes, A::usual, vector_blocking, run_tiles<A>};
}

// Best first; the last takes what is left. Rows that this ISA lacks are not there.
struct ProductList {
  ProductAlgorithm rows[kMaxProducts] = {};
  int64_t count = 0;

  constexpr void add(const ProductAlgorithm& row) { rows[count++] = row; }
};

template <class U, class T>
constexpr ProductList make_products() {
  ProductList list;
  if constexpr (kHasMatrixUnit) {
    list.add({"matrix", Matrix<U>::takes, Matrix<U>::usual, Matrix<U>::blocking, Matrix<U>::run});
  } else if constexpr (T::kHere) {
    list.add({T::kDotTokens > 0 ? "tables_with_dot" : "tables", Tables<T>::takes, Tables<T>::usual,
              Tables<T>::blocking, Tables<T>::run});
  }
  list.add(tiles_row<Gemv>("gemv"));
  if constexpr (kHasTwoBitPanel || kHasBase3Panel) list.add(tiles_row<InPanel>("panel"));
  if constexpr (kWideFrom<Base3> > 0) list.add(tiles_row<Direct<true>>("wide"));
  list.add(tiles_row<Direct<false>>("direct"));
  list.add({"canonical", CanonicalRows::takes, CanonicalRows::usual, vector_blocking,
            CanonicalRows::run});
  return list;
}

constexpr ProductList kProductList = make_products<MatrixUnit, SumTables>();
constexpr const ProductAlgorithm* kProducts = kProductList.rows;
ProductChoices choices;

void multiply_tiles(const ProductJob& job) {
  const ProductShape shape{.format = job.format,
                           .tokens = job.tokens,
                           .k = job.k_steps * layout::kTileStepK,
                           .row_blocks = job.blocks,
                           .block_rows = tile_rows_of(job.format),
                           .planes = job.planes,
                           .grouped = job.grouped()};
  chosen(kProducts, &choices, shape).run(job, nullptr);
}
