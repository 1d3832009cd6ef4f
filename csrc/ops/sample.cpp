// sample_tokens, token_probabilities, top_logprobs: checks, copies of what is checked, results;
// engine/sample.h does the rest.
#include "engine/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/checks.h"
#include "ops/register.h"

namespace bitnet::ops {
namespace {

std::string text(double x) { return std::to_string(x); }
std::string text(int64_t n) { return std::to_string(n); }

engine::LogitRows logit_rows(const Check& check, const Tensor& logits) {
  check.dtype(logits, "logits", ScalarType::Float);
  check.dim(logits, "logits", 2);
  const int64_t vocab = logits.size(1);
  if (vocab < 1 || vocab > std::numeric_limits<int32_t>::max())
    check.fail("logits", "of 1 to 2147483647 tokens", text(vocab));
  return {data<float>(logits), logits.size(0), vocab, vocab};
}

// The values of one option, one for each row, each checked by `good`.
template <class T, class Good>
Scratch<T> option(const Check& check, const Tensor& t, const char* name, ScalarType type,
                  int64_t rows, const char* expected, const Good& good) {
  check.dtype(t, name, type);
  check.shape(t, name, {rows});
  const Tensor dense = as_contiguous(t);
  Scratch<T> values(rows);
  std::copy_n(data<T>(dense), rows, values.get());
  for (int64_t r = 0; r < rows; ++r) {
    if (!good(values.get()[r]))
      check.fail(name, expected, text(values.get()[r]) + " for row " + text(r));
  }
  return values;
}

Scratch<double> zeros(int64_t rows) {
  Scratch<double> values(rows);
  std::fill_n(values.get(), rows, 0.0);
  return values;
}

struct OptionTensors {
  const Tensor &temperature, &top_k, &top_p, &min_p;
  const Tensor* uniforms;  // null: 0
};

Scratch<engine::SamplingOptions> options_of(const Check& check, const OptionTensors& t,
                                            int64_t rows) {
  const auto numbers = [&](const Tensor& values, const char* name, const char* expected,
                           auto good) {
    return option<double>(check, values, name, ScalarType::Double, rows, expected, good);
  };
  const auto temperature = numbers(t.temperature, "temperature", "finite and at least 0",
                                   [](double v) { return v >= 0 && std::isfinite(v); });
  const auto top_k = option<int64_t>(check, t.top_k, "top_k", ScalarType::Long, rows, "at least 0",
                                     [](int64_t v) { return v >= 0; });
  const auto top_p =
      numbers(t.top_p, "top_p", "above 0 and at most 1", [](double v) { return v > 0 && v <= 1; });
  const auto min_p =
      numbers(t.min_p, "min_p", "from 0 to 1", [](double v) { return v >= 0 && v <= 1; });
  const auto uniforms = t.uniforms == nullptr
                            ? zeros(rows)
                            : numbers(*t.uniforms, "uniforms", "from 0 to below 1",
                                      [](double v) { return v >= 0 && v < 1; });
  Scratch<engine::SamplingOptions> options(rows);
  for (int64_t r = 0; r < rows; ++r) {
    options.get()[r] = {temperature.get()[r], top_p.get()[r], min_p.get()[r], top_k.get()[r],
                        uniforms.get()[r]};
  }
  return options;
}

// Copies of the edits: they become addresses.
struct Edits {
  Scratch<int64_t> starts, ids;
  Scratch<engine::LogitEdit> edits;
  bool any;
  engine::LogitEdits view() const { return {any ? starts.get() : nullptr, ids.get(), edits.get()}; }
};

using MaybeTensor = std::optional<Tensor>;

// Which of the three is missing, if some are.
void check_together(const Check& check, const MaybeTensor& starts, const MaybeTensor& ids,
                    const MaybeTensor& edits) {
  const char* const together = "together with the other two of edit_starts, edit_ids and edits";
  if (!starts.has_value()) check.fail("edit_starts", together, "None");
  if (!ids.has_value()) check.fail("edit_ids", together, "None");
  if (!edits.has_value()) check.fail("edits", together, "None");
}

void check_starts(const Check& check, const int64_t* starts, int64_t rows, int64_t count) {
  if (starts[0] != 0) check.fail("edit_starts", "to begin with 0", text(starts[0]));
  for (int64_t r = 0; r < rows; ++r) {
    if (starts[r + 1] < starts[r])
      check.fail("edit_starts", "ascending",
                 text(starts[r + 1]) + " after " + text(starts[r]) + " for row " + text(r));
  }
  if (starts[rows] != count)
    check.fail("edit_starts", "to end with the " + text(count) + " of edit_ids",
               text(starts[rows]));
}

Edits edits_of(const Check& check, const MaybeTensor& starts, const MaybeTensor& ids,
               const MaybeTensor& edits, int64_t rows, int64_t vocab) {
  if (!starts.has_value() && !ids.has_value() && !edits.has_value())
    return {Scratch<int64_t>(0), Scratch<int64_t>(0), Scratch<engine::LogitEdit>(0), false};
  check_together(check, starts, ids, edits);
  check.dtype(*starts, "edit_starts", ScalarType::Long);
  check.shape(*starts, "edit_starts", {rows + 1});
  check.dtype(*ids, "edit_ids", ScalarType::Long);
  check.dim(*ids, "edit_ids", 1);
  const int64_t count = ids->numel();
  check.dtype(*edits, "edits", ScalarType::Float);
  check.shape(*edits, "edits", {count, 3});
  const Tensor dense_starts = as_contiguous(*starts), dense_ids = as_contiguous(*ids);
  const Tensor dense_edits = as_contiguous(*edits);
  Edits copy = {Scratch<int64_t>(rows + 1), Scratch<int64_t>(count),
                Scratch<engine::LogitEdit>(count), true};
  std::copy_n(data<int64_t>(dense_starts), rows + 1, copy.starts.get());
  std::copy_n(data<int64_t>(dense_ids), count, copy.ids.get());
  check_starts(check, copy.starts.get(), rows, count);
  const float* values = data<float>(dense_edits);
  for (int64_t e = 0; e < count; ++e) {
    const int64_t id = copy.ids.get()[e];
    if (id < 0 || id >= vocab) check.fail("edit_ids", "from 0 to " + text(vocab - 1), text(id));
    const engine::LogitEdit edit = {values[3 * e], values[3 * e + 1], values[3 * e + 2]};
    if (!(std::isfinite(edit.bias) && std::isfinite(edit.subtracted) && edit.repetition > 0 &&
          std::isfinite(edit.repetition)))
      check.fail("edits", "finite, with a repetition above 0",
                 "[" + text(double{edit.bias}) + ", " + text(double{edit.repetition}) + ", " +
                     text(double{edit.subtracted}) + "] at " + text(e));
    copy.edits.get()[e] = edit;
  }
  return copy;
}

}  // namespace

Tensor sample_tokens(const Tensor& logits_in, const Tensor& temperature, const Tensor& top_k,
                     const Tensor& top_p, const Tensor& min_p, const Tensor& uniforms,
                     MaybeTensor edit_starts, MaybeTensor edit_ids, MaybeTensor edits_in) {
  const Check check("sample_tokens");
  const int64_t rows = logit_rows(check, logits_in).count;
  const auto options = options_of(check, {temperature, top_k, top_p, min_p, &uniforms}, rows);
  const Edits edits = edits_of(check, edit_starts, edit_ids, edits_in, rows, logits_in.size(1));
  const Tensor logits = as_contiguous(logits_in);
  Tensor tokens = empty({rows}, ScalarType::Long);
  engine::sample_tokens(logit_rows(check, logits), options.get(), edits.view(),
                        mutable_data<int64_t>(tokens));
  return tokens;
}

Tensor token_probabilities(const Tensor& logits_in, const Tensor& temperature, const Tensor& top_k,
                           const Tensor& top_p, const Tensor& min_p, MaybeTensor edit_starts,
                           MaybeTensor edit_ids, MaybeTensor edits_in) {
  const Check check("token_probabilities");
  const int64_t rows = logit_rows(check, logits_in).count;
  const auto options = options_of(check, {temperature, top_k, top_p, min_p, nullptr}, rows);
  const Edits edits = edits_of(check, edit_starts, edit_ids, edits_in, rows, logits_in.size(1));
  const Tensor logits = as_contiguous(logits_in);
  Tensor probabilities = empty(shape_of(logits), ScalarType::Float);
  engine::token_probabilities(logit_rows(check, logits), options.get(), edits.view(),
                              mutable_data<float>(probabilities));
  return probabilities;
}

std::tuple<Tensor, Tensor, Tensor> top_logprobs(const Tensor& logits_in, const Tensor& tokens_in,
                                                int64_t top) {
  const Check check("top_logprobs");
  const int64_t rows = logit_rows(check, logits_in).count, vocab = logits_in.size(1);
  const std::string expected = "from -1 (none) to " + text(vocab - 1);
  const auto tokens =
      option<int64_t>(check, tokens_in, "tokens", ScalarType::Long, rows, expected.c_str(),
                      [vocab](int64_t v) { return v >= -1 && v < vocab; });
  if (top < 0 || top > vocab) check.fail("top", "from 0 to " + text(vocab), text(top));
  const Tensor logits = as_contiguous(logits_in);
  Tensor of_tokens = empty({rows}, ScalarType::Float);
  Tensor ids = empty({rows, top}, ScalarType::Long);
  Tensor of_ids = empty({rows, top}, ScalarType::Float);
  engine::top_logprobs(logit_rows(check, logits), tokens.get(), top, mutable_data<float>(of_tokens),
                       mutable_data<int64_t>(ids), mutable_data<float>(of_ids));
  return {std::move(of_tokens), std::move(ids), std::move(of_ids)};
}

BITNET_LIBRARY_IMPL(m) {
  BITNET_OP(m, sample_tokens);
  BITNET_OP(m, token_probabilities);
  BITNET_OP(m, top_logprobs);
}

}  // namespace bitnet::ops
