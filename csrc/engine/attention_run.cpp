// Running tasks of attention; see attention_run.h.
#include "engine/attention_run.h"

#include <algorithm>
#include <atomic>
#include <bit>

namespace bitnet::engine {
namespace {

int64_t query_floats(const AttentionCut& cut) {
  const AttentionShape& shape = cut.shape();
  const int64_t rows = cut.max_rows();
  if (!shape.pool.scaled()) return attention_padded(rows * shape.dim);
  return attention_padded(rows) + rows * wide_padded(shape.dim) / 2;
}

}  // namespace

AttentionRun::Memory AttentionRun::take(const AttentionCut& cut, const PoolAccess& access,
                                        float* thread_memory) {
  const AttentionShape& shape = cut.shape();
  Memory memory{};
  const auto piece = [&](int64_t floats) {
    float* at = thread_memory == nullptr ? nullptr : thread_memory + memory.floats;
    memory.floats += floats;
    return at;
  };
  memory.query = piece(query_floats(cut));
  memory.tokens = piece(cut.some_read_by_token() ? query_floats(cut) : 0);
  memory.row = piece(attention_padded(shape.dim));
  memory.gathered = piece(access.floats(shape.pool));
  memory.scratch = piece(attention_scratch_floats(cut.max_rows(), shape.dim));
  memory.states = piece(2 * cut.max_rows() * cut.state_floats());
  return memory;
}

int64_t AttentionRun::floats(const AttentionCut& cut, const PoolAccess& access) {
  return take(cut, access, nullptr).floats;
}

AttentionRun::AttentionRun(const AttentionCut& cut, const PoolAccess& access,
                           const KernelTable& kernels, const AttentionBuffers& buffers,
                           float* shared, float* thread_memory)
    : cut_(cut),
      shape_(cut.shape()),
      kernels_(kernels),
      buffers_(buffers),
      shared_(shared),
      memory_(take(cut, access, thread_memory)),
      query_(query_at(memory_.query)),
      reader_(cut, access, buffers.pool, memory_.gathered) {}

AttentionRun::Query AttentionRun::query_at(float* memory) const {
  if (!shape_.pool.scaled()) return {memory, nullptr, nullptr};
  return {nullptr, reinterpret_cast<int16_t*>(memory + attention_padded(cut_.max_rows())), memory};
}

void AttentionRun::load_query(const Group& group) const {
  const Query& query = query_;
  float* row = memory_.row;                              // for one row on its way
  const int64_t n = cut_.rows_per_token() * shape_.dim;  // the heads of a group lie side by side
  const int64_t dim = shape_.dim, padded = wide_padded(dim);
  const bool rounds = shape_.pool.type == DType::kBF16;  // as attend_chunk wants queries
  for (int64_t t = 0; t < group.tokens; ++t) {
    const int64_t first = ((group.token + t) * shape_.kv_heads + group.kv_head) * n;
    const void* from = offset_bytes(buffers_.query, first * element_size(shape_.query_type));
    if (query.rows != nullptr) {
      const bool floats = shape_.query_type == DType::kF32;
      if (!rounds || !floats) kernels_.load_row(shape_.query_type, from, n, query.rows + t * n);
      const float* loaded = floats ? static_cast<const float*>(from) : query.rows + t * n;
      for (int64_t h = 0; rounds && h < cut_.rows_per_token(); ++h) {
        float* q = query.rows + t * n + h * dim;
        kernels_.store_cache_row(shape_.pool.type, loaded + h * dim, dim, row);
        kernels_.load_row(shape_.pool.type, row, dim, q);
      }
      continue;
    }
    for (int64_t h = 0; h < cut_.rows_per_token(); ++h) {
      const int64_t r = t * cut_.rows_per_token() + h;
      kernels_.load_row(shape_.query_type,
                        offset_bytes(from, h * dim * element_size(shape_.query_type)), dim, row);
      query.scale[r] = kernels_.quantize_query(row, dim, padded, query.wide + r * padded);
    }
  }
}

void AttentionRun::store_out(const Group& group, const float* states) const {
  for (int64_t r = 0; r < cut_.rows_of(group); ++r) {
    const int64_t token = group.token + r / cut_.rows_per_token();
    const int64_t head = group.kv_head * cut_.rows_per_token() + r % cut_.rows_per_token();
    const int64_t at = (token * shape_.heads + head) * shape_.dim;
    void* to = offset_bytes(buffers_.out, at * element_size(shape_.query_type));
    const bool floats = shape_.query_type == DType::kF32;
    float* finished = floats ? static_cast<float*>(to) : memory_.row;
    kernels_.finish_attention(shape_.dim, states + r * cut_.state_floats(), finished);
    if (!floats) kernels_.store_row(shape_.query_type, finished, shape_.dim, to);
  }
}

// Writes the states of the rows that see something of the piece: at their places, rows
// [rows_before, rows_up_to); or, if the group reads by token, those of the piece's tokens side by
// side.
void AttentionRun::attend(const Group& group, const Piece& piece, const Next& next,
                          bool same_queries, float* states) const {
  const int64_t begin = piece.begin();
  Query read = query_;
  int64_t first = cut_.rows_before(group, piece), count = cut_.rows_up_to(group, piece) - first;
  if (cut_.reads_by_token(group)) {
    read = rows_of_tokens(piece.tokens);
    // A token inside the page always reads it, so tokens up to its end are neighbours; tokens
    // behind it see all of it. So the kernel can tell what a row sees by the row's place.
    first = std::countr_zero(piece.tokens) * cut_.rows_per_token();
    count = std::popcount(piece.tokens) * cut_.rows_per_token();
  } else if (read.rows != nullptr) {
    read.rows += first * shape_.dim;
  } else {
    read.wide += first * wide_padded(shape_.dim);
    read.scale += first;
  }
  AttentionChunk chunk = {};
  chunk.query = read.rows;
  chunk.rows = count;
  chunk.dim = shape_.dim;
  chunk.rows_per_token = cut_.rows_per_token();
  chunk.type = shape_.pool.type;
  chunk.positions = cut_.positions_of(group, piece);
  chunk.first_visible = group.position + 1 + first / cut_.rows_per_token() - begin;
  chunk.scale = shape_.scale;
  chunk.same_queries = same_queries;
  reader_.fill(group, piece, next, read, chunk);
  if (piece.kind == Piece::kWindow)
    chunk.first_hidden = chunk.first_visible - shape_.policy.window_at(group.position);
  if (!cut_.reads_by_token(group)) states += first * cut_.state_floats();
  kernels_.attend_chunk(chunk, memory_.scratch, states);
}

AttentionRun::Query AttentionRun::rows_of_tokens(uint64_t tokens) const {
  const Query& query = query_;
  const int64_t n = cut_.rows_per_token(), dim = shape_.dim, wide = wide_padded(dim);
  const int first = std::countr_zero(tokens), count = std::popcount(tokens);
  const auto from = [&](int64_t token) -> Query {
    if (query.rows != nullptr) return {query.rows + token * n * dim, nullptr, nullptr};
    return {nullptr, query.wide + token * n * wide, query.scale + token * n};
  };
  if (std::countr_one(tokens >> first) == count) return from(first);
  const Query to = query_at(memory_.tokens);
  for (int64_t i = 0; tokens != 0; tokens &= tokens - 1, ++i) {
    const Query row = from(std::countr_zero(tokens));
    if (row.rows != nullptr) {
      std::copy_n(row.rows, n * dim, to.rows + i * n * dim);
    } else {
      std::copy_n(row.wide, n * wide, to.wide + i * n * wide);
      std::copy_n(row.scale, n, to.scale + i * n);
    }
  }
  return to;
}

void AttentionRun::merge_tokens(uint64_t tokens, const float* later, uint64_t& begun,
                                float* states) const {
  const int64_t floats = cut_.rows_per_token() * cut_.state_floats();
  for (uint64_t left = tokens; left != 0; left &= left - 1, later += floats) {
    float* to = states + std::countr_zero(left) * floats;
    if ((begun & left & -left) != 0) {
      kernels_.merge_attention(cut_.rows_per_token(), shape_.dim, later, to);
    } else {
      std::copy_n(later, floats, to);
    }
  }
  begun |= tokens;
}

// Merges the states of a piece into those of the pieces before it. The last rows may see none of
// these pieces: their states are copied. That happens only if the first piece is one of windows;
// all rows see a first piece of another kind.
void AttentionRun::merge(const Group& group, int64_t piece, const float* later,
                         float* states) const {
  const Piece now = piece_of(group, piece);
  const int64_t begin = cut_.rows_before(group, now), end = cut_.rows_up_to(group, now);
  int64_t others = end;
  if (piece_of(group, 0).kind == Piece::kWindow)
    others = std::clamp(cut_.rows_up_to(group, piece_of(group, piece - 1)), begin, end);
  const int64_t at = begin * cut_.state_floats(), first = others * cut_.state_floats();
  kernels_.merge_attention(others - begin, shape_.dim, later + at, states + at);
  std::copy(later + first, later + end * cut_.state_floats(), states + first);
}

void AttentionRun::run(int64_t begin, int64_t end) const {
  int32_t loaded = -1;  // the group whose query is loaded
  for (int64_t i = begin; i < end; ++i) {
    const AttentionCut::Task& task = cut_.task(i);
    const Group& group = cut_.group_of(task);
    if (task.group != loaded) load_query(group);
    loaded = task.group;
    if (i < cut_.split_tasks()) {
      run_chunk(i);
    } else {
      run_group(group);
    }
  }
}

void AttentionRun::run_chunk(int64_t task) const {
  const int64_t piece = cut_.task(task).piece;
  const Group& group = cut_.group_of(cut_.task(task));
  Next next;
  if (task + 1 < cut_.split_tasks()) {
    const AttentionCut::Task& after = cut_.task(task + 1);
    const Group& group_after = cut_.group_of(after);
    if (after.piece < pieces_of(group_after))
      next = {&group_after, piece_of(group_after, after.piece)};
  }
  const int64_t piece_floats = cut_.rows_of(group) * cut_.state_floats();
  float* states = cut_.states_of(group, shared_);
  const auto states_of = [&](int64_t i) { return states + i * piece_floats; };
  const int64_t pieces = pieces_of(group);
  if (piece < pieces) attend(group, piece_of(group, piece), next, false, states_of(piece));
  // acq_rel: the last thread sees what the others wrote.
  std::atomic_ref<int32_t> left(reinterpret_cast<int32_t*>(shared_)[group.counter]);
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  left.store(static_cast<int32_t>(group.pieces), std::memory_order_relaxed);
  if (cut_.reads_by_token(group)) {
    uint64_t begun = 0;
    float* all = memory_.states;
    for (int64_t i = 0; i < pieces; ++i)
      merge_tokens(piece_of(group, i).tokens, states_of(i), begun, all);
    states = all;
  } else {
    for (int64_t i = 1; i < pieces; ++i) merge(group, i, states_of(i), states);
  }
  store_out(group, states);
}

void AttentionRun::run_group(const Group& group) const {
  float* states = memory_.states;
  float* later = states + cut_.rows_of(group) * cut_.state_floats();
  const int64_t pieces = pieces_of(group);
  const bool by_token = cut_.reads_by_token(group);
  uint64_t begun = 0;
  int64_t first = -1, end = -1;  // rows that the last piece had
  for (int64_t i = 0; i < pieces; ++i) {
    const Next next = i + 1 == pieces ? Next{} : Next{&group, piece_of(group, i + 1)};
    const Piece piece = piece_of(group, i);
    const bool same = !by_token && first == cut_.rows_before(group, piece) &&
                      end == cut_.rows_up_to(group, piece);
    first = cut_.rows_before(group, piece), end = cut_.rows_up_to(group, piece);
    attend(group, piece, next, same, i == 0 && !by_token ? states : later);
    if (by_token) {
      merge_tokens(piece.tokens, later, begun, states);
    } else if (i > 0) {
      merge(group, i, later, states);
    }
  }
  store_out(group, states);
}

}  // namespace bitnet::engine
