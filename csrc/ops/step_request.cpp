// The checks of step_request.h.
#include "ops/step_request.h"

#include <cmath>

namespace bitnet::ops {
namespace {

void copy_logit_rows(const Check& check, const Tensor& rows, int64_t tokens,
                     std::vector<int64_t>& copy) {
  check.dim(rows, "logit_rows", 1);
  if (rows.size(0) > tokens)  // the workspace has room for as many as there are tokens
    check.fail("logit_rows", "of at most the " + std::to_string(tokens) + " tokens of x",
               std::to_string(rows.size(0)));
  copy_indices(check, rows, "logit_rows", {rows.size(0)}, copy);
  for (const int64_t row : copy) {
    if (!(row >= 0 && row < tokens))
      check.fail("logit_rows", "of rows in [0, " + std::to_string(tokens) + ")",
                 std::to_string(row));
  }
}

// The adapter of every token from those of the sequences.
void copy_adapters(const Check& check, const Tensor& adapters, int64_t tokens, int64_t count,
                   const engine::Sequences& sequences, std::vector<int64_t>& of_sequences,
                   std::vector<int64_t>& copy) {
  copy_indices(check, adapters, "adapters", {sequences.count}, of_sequences);
  copy.assign(static_cast<size_t>(tokens), -1);
  for (int64_t s = 0; s < sequences.count; ++s) {
    const int64_t adapter = of_sequences[static_cast<size_t>(s)];
    if (!(adapter >= -1 && adapter < count))
      check.fail("adapters", "from -1 (none) to " + std::to_string(count - 1),
                 std::to_string(adapter));
    for (int64_t t = sequences.query_start[s]; t < sequences.query_start[s + 1]; ++t)
      copy[static_cast<size_t>(t)] = adapter;
  }
}

void copy_draws(const Check& check, const Tensor& draws, int64_t rows,
                std::vector<engine::Noise>& copy) {
  check.dtype(draws, "draws", ScalarType::Double);
  check.shape(draws, "draws", {rows, 2});
  const Tensor dense = as_contiguous(draws);
  const double* values = data<double>(dense);
  copy.clear();
  for (int64_t r = 0; r < rows; ++r) {
    const double temperature = values[2 * r], uniform = values[2 * r + 1];
    if (!(temperature >= 0 && std::isfinite(temperature) && uniform >= 0 && uniform < 1))
      check.fail("draws", "of temperatures finite and at least 0, uniforms from 0 to below 1",
                 std::to_string(temperature) + " and " + std::to_string(uniform) + " for row " +
                     std::to_string(r));
    copy.push_back(engine::noise_of(temperature, uniform));
  }
}

}  // namespace

void StepRequest::set(const Check& check, const Named& step, const engine::Program& program,
                      int64_t tokens, int64_t blocks, int64_t block_size, const StatePool* states) {
  const Tensor& positions = step.get(check, "positions");
  has_axes_ = positions.dim() == 2;
  copy_indices(check, positions, "positions", has_axes_ ? Shape{3, tokens} : Shape{tokens},
               positions_);
  for (const int64_t position : positions_) {
    if (position < 0) check.fail("positions", "at least 0", std::to_string(position));
  }
  copy_slots(check, step.get(check, "slot_mapping"), tokens, blocks * block_size, slots_);
  sequences_.set(check, step.get(check, "query_start_loc"), step.get(check, "seq_lens"),
                 step.get(check, "block_table"), tokens, blocks, block_size);
  copy_logit_rows(check, step.get(check, "logit_rows"), tokens, logit_rows_);
  const Tensor* draws = step.find("draws");
  noisy_ = draws != nullptr;
  if (noisy_) copy_draws(check, *draws, rows(), noise_);
  const Tensor* adapters = step.find("adapters");
  adapted_ = adapters != nullptr;
  if (adapted_)
    copy_adapters(check, *adapters, tokens, program.adapters(), sequences_.view(), of_sequences_,
                  adapters_);
  const Tensor* state_steps = step.find("state_steps");
  if ((state_steps != nullptr) != (states != nullptr))
    check.fail("state_steps",
               states != nullptr ? "of a program with states"
                                 : "to be None, for the program has no states",
               state_steps != nullptr ? "some" : "None");
  if (states != nullptr)
    copy_state_steps(check, *state_steps, sequences_.view(), *states, state_steps_);
}

void StepRequest::check_pages(const Check& check, int64_t block_size) const {
  ops::check_pages(check, state_steps_, sequences_.view(), slots_, block_size);
}

void StepRequest::fill(engine::Batch& batch) const {
  batch.positions = {positions_.data(),
                     has_axes_ ? static_cast<int64_t>(positions_.size()) / 3 : 0};
  batch.slots = slots_.data();
  batch.logit_rows = logit_rows_.data();
  batch.logit_count = rows();
  batch.sequences = sequences_.view();
  batch.adapters = adapted_ ? adapters_.data() : nullptr;
  batch.state_steps = state_steps_.data();
  batch.noise = noisy_ ? noise_.data() : nullptr;
}

}  // namespace bitnet::ops
