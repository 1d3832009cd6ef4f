// bind_program and release_program: a text and named tensors become a program, and a handle to it.
#include "ops/program.h"

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>

#include "format/layout.h"
#include "ops/group_scales.h"
#include "ops/head_view.h"
#include "ops/named.h"
#include "ops/register.h"
#include "ops/weight_view.h"

namespace bitnet::ops {
namespace {

using engine::LoraWeight;
using engine::ProgramError;
using engine::Projection;
using engine::Weight;

constexpr int64_t kMaxRank = 1 << 16;  // products with it stay far from overflow

// The tensors of a program by name, checked as they are asked for.
class NamedTensors final : public engine::TensorSource {
 public:
  NamedTensors(const Check& check, const std::vector<std::string>& names,
               const std::vector<Tensor>& tensors)
      : check_(check) {
    if (names.size() != tensors.size())
      check.fail("names", "as many as tensors, " + std::to_string(tensors.size()),
                 std::to_string(names.size()));
    for (size_t i = 0; i < names.size(); ++i) {
      if (!tensors_.emplace(names[i], &tensors[i]).second)
        check.fail("names", "all different", names[i] + " twice");
    }
  }

  bool has(const std::string& name) const override { return tensors_.contains(name); }

  Weight linear(const std::string& name, int64_t rows, int64_t k, Projection& scaled) override {
    const std::string weight_name = name + ".weight", scale_name = name + ".weight_scale";
    const Tensor& weight = get(weight_name);
    check_.dtype(weight, weight_name.c_str(), ScalarType::Byte);  // before a look at its shape
    const bool canonical = weight.dim() == 2;
    const Weight view = weight_view(check_, weight, weight_name.c_str(), k,
                                    canonical ? std::nullopt : std::optional<int64_t>(rows));
    if (view.n_rows != rows)
      check_.fail(weight_name, "with " + std::to_string(rows) + " rows",
                  std::to_string(view.n_rows));
    scaled =
        scaled_projection(check_, view, get(scale_name), scale_name.c_str(), DType::kF32, nullptr);
    scaled.bias = has(name + ".bias") ? floats(name + ".bias", rows) : nullptr;
    return view;
  }

  engine::Signs signs(const std::string& name, int64_t k) override {
    const std::string signs_name = name + ".signs";
    if (!has(signs_name)) return {};
    const Tensor& t = get(signs_name);
    check_.dtype(t, signs_name.c_str(), ScalarType::Float);
    check_.dim(t, signs_name.c_str(), 2);
    check_.contiguous(t, signs_name.c_str());
    const int64_t block = t.size(1);
    check_block(check_, signs_name, block, k);
    check_.shape(t, signs_name.c_str(), {k / block, block});
    return {data<float>(t), block};
  }

  const uint8_t* columns(const std::string& name, int64_t rows, int64_t k) override {
    const std::string columns_name = name + ".columns";
    const Tensor& t = get(columns_name);
    check_.dtype(t, columns_name.c_str(), ScalarType::Byte);
    check_.shape(t, columns_name.c_str(), {layout::column_panels(rows), k, layout::kColumnBytes});
    check_.contiguous(t, columns_name.c_str());
    return data<uint8_t>(t);
  }

  const float* matrix(const std::string& name, int64_t rows, int64_t n) override {
    const Tensor& t = get(name);
    check_.dtype(t, name.c_str(), ScalarType::Float);
    check_.shape(t, name.c_str(), {rows, n});
    check_.contiguous(t, name.c_str());
    return data<float>(t);
  }

  const float* floats(const std::string& name, int64_t n) override {
    const Tensor& t = get(name);
    check_.dtype(t, name.c_str(), ScalarType::Float);
    check_.shape(t, name.c_str(), {n});
    check_.contiguous(t, name.c_str());
    return data<float>(t);
  }

  engine::HeadView head(const std::string& name, int64_t rows, int64_t k) override {
    const std::string prefix = name + ".";
    const Tensor& weight = get(prefix + "weight");
    std::optional<Tensor> scale;
    if (has(prefix + "scale")) scale = Tensor::borrow(get(prefix + "scale"));
    check_vocab(prefix, weight, scale, rows);
    return head_view(Check("bind_program", prefix.c_str()), weight, scale, k, rows);
  }

  LoraWeight factors(const std::string& a_name, const std::string& b_name, int64_t rows,
                     int64_t k) override {
    const Tensor &a = get(a_name), &b = get(b_name);
    check_.float_dtype(a, a_name.c_str());
    check_.dim(a, a_name.c_str(), 2);
    const int64_t rank = a.size(0);
    if (!(rank >= 1 && rank <= kMaxRank))
      check_.fail(a_name, "of 1 to " + std::to_string(kMaxRank) + " rows (the rank)",
                  std::to_string(rank));
    check_.shape(a, a_name.c_str(), {rank, k});
    check_.contiguous(a, a_name.c_str());
    check_.dtype(b, b_name.c_str(), a.scalar_type());
    check_.shape(b, b_name.c_str(), {engine::lora_tiles(rows), rank, engine::kLoraTileRows});
    check_.contiguous(b, b_name.c_str());
    return {dtype_of(a), a.const_data_ptr(), b.const_data_ptr(), rank, 0.0f};
  }

 private:
  const Tensor& get(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end())
      check_.fail("tensors", "with one named " + name + ", as the program says", "none");
    return *found->second;
  }

  // Of a head in tiles, whose last one may be partly empty.
  void check_vocab(const std::string& prefix, const Tensor& weight,
                   const std::optional<Tensor>& scale, int64_t vocab) const {
    if (!weight.defined() || weight.dim() < 1) return;  // head_view has words for that
    if (is_ternary_head(weight, scale)) return;         // of any layout: head_view knows
    const bool tiles = weight.dim() == 3;
    const int64_t rows = weight.size(0);
    const int64_t padded = tiles ? rows * layout::kHeadTileRows : rows;
    if (vocab > padded || vocab <= padded - (tiles ? layout::kHeadTileRows : 1))
      check_.fail("vocab",
                  "to be the " + std::to_string(rows) +
                      (tiles ? " tiles of 16 rows of " : " rows of ") + prefix + "weight",
                  std::to_string(vocab));
  }

  const Check& check_;
  std::map<std::string, const Tensor*> tensors_;
};

// What a handle stands for.
struct Entry {
  std::string text;
  std::vector<std::string> names;
  std::vector<Tensor> tensors;
  std::mutex binding;
  std::shared_ptr<const BoundProgram> bound;  // exchanged under `binding`
};

struct Registry {
  std::mutex mutex;  // a shared one would ask for a newer libc than the kernel form may
  std::unordered_map<int64_t, std::shared_ptr<Entry>> entries;
  int64_t next = 1;
};

// Never destroyed: a thread may run a step while the process ends.
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

int64_t number_of(const Check& check, const Tensor& handle) {
  check.dtype(handle, "program", ScalarType::Long);
  check.shape(handle, "program", {1});
  return data<int64_t>(handle)[0];
}

}  // namespace

BoundProgram::BoundProgram(const Check& check, const std::string& text,
                           const std::vector<std::string>& names,
                           const std::vector<Tensor>& tensors) {
  static std::atomic<int64_t> bindings{0};
  id_ = ++bindings;
  std::vector<Tensor> now;  // as they are now, whatever was asked of them before
  for (const Tensor& t : tensors) now.push_back(Tensor::borrow(t));
  NamedTensors source(check, names, now);
  for (size_t i = 0; i < now.size(); ++i) {
    const auto size = static_cast<int64_t>(now[i].element_size());
    spans_.push_back({now[i].const_data_ptr(), now[i].numel() * size, names[i].c_str()});
  }
  try {
    program_ = std::make_unique<engine::Program>(text, source, active_kernels());
  } catch (const ProgramError& error) {
    throw std::runtime_error(std::string("bind_program: ") + error.what());
  }
}

bool BoundProgram::current(const std::vector<Tensor>& tensors) const {
  if (&program_->kernels() != &active_kernels()) return false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].const_data_ptr() != spans_[i].data) return false;
  }
  return true;
}

void BoundProgram::keep_apart(const Check& check, const Mutated& mutated) const {
  for (const Span& span : spans_) mutated.keep_apart(check, span.data, span.bytes, span.name);
}

ProgramInUse bound_program(const Check& check, const Tensor& handle) {
  const int64_t number = number_of(check, handle);
  std::shared_ptr<Entry> entry;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    if (const auto found = all.entries.find(number); found != all.entries.end())
      entry = found->second;
  }
  if (entry == nullptr)
    check.fail("program", "a handle that bind_program returned in this process, not yet released",
               std::to_string(number));
  const std::lock_guard lock(entry->binding);
  if (!entry->bound->current(entry->tensors)) {
    entry->bound = std::make_shared<const BoundProgram>(Check("bind_program"), entry->text,
                                                        entry->names, entry->tensors);
  }
  return {entry, entry->bound};
}

// names: the tensors', one a line
Tensor bind_program(std::string program, std::string names, std::vector<Tensor> tensors) {
  const auto entry = std::make_shared<Entry>();
  entry->text = std::move(program);
  entry->names = lines_of(names);
  entry->tensors = std::move(tensors);
  entry->bound = std::make_shared<const BoundProgram>(Check("bind_program"), entry->text,
                                                      entry->names, entry->tensors);
  Tensor handle = empty({1}, ScalarType::Long);
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  mutable_data<int64_t>(handle)[0] = all.next;
  all.entries.emplace(all.next++, entry);
  return handle;
}

void release_program(const Tensor& program) {
  const int64_t number = number_of(Check("release_program"), program);
  std::shared_ptr<Entry> released;  // its tensors go when the lock is gone
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (const auto found = all.entries.find(number); found != all.entries.end()) {
    released = found->second;
    all.entries.erase(found);
  }
}

BITNET_LIBRARY_IMPL(m) {
  BITNET_OP(m, bind_program);
  BITNET_OP(m, release_program);
}

}  // namespace bitnet::ops
