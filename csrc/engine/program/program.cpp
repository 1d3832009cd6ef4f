// Binding of programs; see program.h.
#include "engine/program/program.h"

#include <algorithm>
#include <charconv>

#include "engine/blocks/blocks.h"
#include "engine/head.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kMaxAdapters = 1 << 12, kMaxDigits = 4;

// A key of the line `model` that is a small number and not negative.
float epsilon(Keys& keys, const char* key, float otherwise) {
  const float value = keys.number(key, otherwise);
  if (value < 0) keys.fail(key, "at least 0", std::to_string(value));
  return value;
}

// How many adapters the lines `lora` speak of.
int64_t count_adapters(const std::vector<Line>& lines) {
  int64_t count = 0;
  for (const Line& line : lines) {
    if (line.kind != "lora") continue;
    count = std::max(count, Keys(line).integer("adapter", 0, kMaxAdapters - 1) + 1);
  }
  return count;
}

// "11,11,10": how many pairs turn by time, height and width.
void read_sections(Keys& keys, int64_t pairs, Rope& rope) {
  const std::string text = keys.word("sections");
  std::vector<int64_t> counts;
  const char *at = text.data(), *const end = at + text.size();
  for (bool more = true; more;) {
    const auto [next, error] = std::from_chars(at, end, counts.emplace_back());
    more = error == std::errc() && next != end && *next == ',';
    at = more ? next + 1 : next;
  }
  if (at != end || !set_sections(counts, pairs, rope))
    keys.fail("sections",
              "of pairs that turn by time,height,width, " + std::to_string(pairs) + " together",
              text);
}

}  // namespace

Binding::Binding(Program& program, Keys& keys, TensorSource& source, int64_t adapters,
                 std::vector<Linear*>& linears, Needs& needs)
    : program(program),
      keys(keys),
      source(source),
      settings(program.settings()),
      needs(needs),
      adapters_(adapters),
      linears_(linears) {}

void Binding::linear(const char* key, int64_t rows, int64_t k, Linear& to) {
  to.name = keys.word(key);
  to.rows = rows;
  to.copies = keys.integer("digits", 1, kMaxDigits, 1);
  if (k > kMaxFeatures / to.copies)
    keys.fail("digits", "of at most " + std::to_string(kMaxFeatures) + " features",
              std::to_string(to.copies));
  k *= to.copies;
  to.k = k;
  to.weight = source.linear(to.name, rows, k, to.scaled);
  const std::string norm = to.name + ".rms_norm.weight";
  to.norm = source.has(norm) ? source.floats(norm, k) : nullptr;
  if (to.norm != nullptr && to.copies != 1)
    keys.fail("digits", "1, for " + to.name + " has a norm of its own", std::to_string(to.copies));
  to.signs = source.signs(to.name, k);
  to.lora.assign(static_cast<size_t>(adapters_), LoraWeight{});
  for (const Linear* other : linears_) {
    if (other->name == to.name) keys.fail(key, "with a projection of its own", to.name + " again");
  }
  linears_.push_back(&to);
}

Norm Binding::norm(const char* key, int64_t n, float eps) {
  return {source.floats(keys.word(key) + ".weight", n), eps};
}

Norm Binding::optional_norm(const char* key, int64_t n, float eps) {
  return keys.has(key) ? norm(key, n, eps) : Norm{nullptr, eps};
}

ActivationFormat Binding::input_of(std::initializer_list<const Linear*> linears) {
  const Linear& first = **linears.begin();
  for (const Linear* other : linears) {
    if (other->scaled.group() != first.scaled.group())
      throw ProgramError("expected " + other->name + " with scales of groups like " + first.name +
                         "'s, for they read the same tokens, got groups of " +
                         std::to_string(other->scaled.group()) + " and " +
                         std::to_string(first.scaled.group()) + " weights (0: none)");
    if ((other->norm == nullptr) != (first.norm == nullptr))
      throw ProgramError("expected " + other->name + " with a norm of its own if " + first.name +
                         " has one, got one norm of two");
    if (first.norm == nullptr && !(other->signs == first.signs))
      throw ProgramError("expected " + other->name + " with the signs of " + first.name +
                         ", for they read the same tokens, got others");
  }
  const std::string name = keys.word("activation_format", "int8");
  ActivationFormat format = ActivationFormat::kInt8;
  if (name == "int8_group") {
    format = ActivationFormat::kInt8Group;
  } else if (name == "int16_group") {
    format = ActivationFormat::kInt16Group;
  } else if (name != "int8") {
    keys.fail("activation_format", "int8, int8_group or int16_group", name);
  }
  const bool grouped = first.scaled.grouped();
  needs.input = std::max(needs.input, first.k);
  needs.row = std::max(needs.row, first.norm == nullptr ? first.k : 2 * first.k);
  if (first.norm != nullptr)
    needs.inputs = std::max(needs.inputs, static_cast<int64_t>(linears.size()));
  if (!grouped) return ActivationFormat::kInt8;
  grouped_ = needs.group_sums = true;
  needs.group_scales |= format != ActivationFormat::kInt8;
  needs.planes = std::max(needs.planes, planes_of(format));
  return format;
}

ActivationSparsity Binding::sparsity(Linear& linear) {
  const ActivationSparsity s = read_sparsity(keys);
  if (!s.skips && !s.drops()) return s;
  if (linear.scaled.grouped())
    keys.fail("sparsity", "absent, for " + linear.name + " has scales of groups", "it");
  if (linear.signs.block != 0)
    keys.fail("sparsity", "absent, for the input of " + linear.name + " has a Hadamard transform",
              "it");
  if (!s.skips) return s;
  if (linear.k > layout::kTileMaxK)
    keys.fail("sparsity", "absent, for " + linear.name + " has more than 32768 inputs", "it");
  linear.columns = source.columns(linear.name, linear.rows, linear.k);
  linear.max_listed = s.always ? linear.k : -1;
  return s;
}

void Binding::finish() {
  const std::string format = keys.word("activation_format", "int8");
  if (!grouped_ && format != "int8")
    keys.fail("activation_format", "int8, for no projection of the line has scales of groups",
              format);
}

Program::Program(std::string_view text, TensorSource& source, const KernelTable& kernels)
    : kernels_(&kernels) {
  const std::vector<Line> lines = parse_listing(text);
  if (lines.empty() || lines[0].kind != "model")
    throw ProgramError("expected a program that begins with a line model, got " +
                       (lines.empty() ? "no line" : "a line " + lines[0].kind));
  const int64_t adapters = count_adapters(lines);
  for (const Line& line : lines) {
    Keys keys(line);
    if (&line == &lines[0]) {
      read_settings(keys);
    } else if (out_features_ != 0 && line.kind != "lora") {
      throw ProgramError("expected nothing but lines lora behind the head, got line " +
                         std::to_string(line.number) + " (" + line.kind + ")");
    } else if (line.kind == "rope") {
      read_rope(keys, source);
    } else if (line.kind == "lora") {
      read_lora(keys, source);
    } else {
      read_block(keys, source, adapters);
    }
    keys.finish();
  }
  if (out_features_ == 0)
    throw ProgramError("expected a program that ends with a line head, got none");
  adapters_ = adapters;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (blocks_[i]->mixes_tokens()) last_mixer_ = static_cast<int64_t>(i);
  }
  tune_columns(kernels, linears_);
}

void Program::read_settings(Keys& keys) {
  settings_.hidden = keys.integer("hidden", 1, kMaxFeatures);
  const std::string type = keys.word("dtype");
  if (type != "float32" && type != "bfloat16") keys.fail("dtype", "float32 or bfloat16", type);
  settings_.type = type == "bfloat16" ? DType::kBF16 : DType::kF32;
  settings_.eps = epsilon(keys, "eps", keys.number("eps"));
  settings_.sub_eps = epsilon(keys, "sub_norm_eps", settings_.eps);
  settings_.linear_eps = epsilon(keys, "linear_norm_eps", settings_.eps);
  settings_.ahead = head_prefetch();
  needs_.row = settings_.hidden;
}

void Program::read_rope(Keys& keys, TensorSource& source) {
  NamedRope rope{keys.word("name"), keys.integer("dim", 2, kMaxFeatures), {}};
  if (rope.dim % 2 != 0) keys.fail("dim", "even", std::to_string(rope.dim));
  const float factor = keys.number("factor", 1.0f);
  if (!(factor > 0)) keys.fail("factor", "above 0", std::to_string(factor));
  rope.rope = {source.floats(keys.word("inv_freq"), rope.dim / 2), factor};
  if (keys.has("sections")) read_sections(keys, rope.dim / 2, rope.rope);
  for (const NamedRope& other : ropes_) {
    if (other.name == rope.name) keys.fail("name", "a name of its own", rope.name + " again");
  }
  ropes_.push_back(std::move(rope));
}

void Program::read_lora(Keys& keys, TensorSource& source) {
  const auto adapter = static_cast<size_t>(keys.integer("adapter", 0, kMaxAdapters - 1));
  const std::string name = keys.word("projection");
  const auto found = std::ranges::find_if(
      linears_, [&name](const Linear* linear) { return linear->name == name; });
  if (found == linears_.end()) keys.fail("projection", "one of a block above", name);
  Linear& linear = **found;
  if (linear.copies != 1) keys.fail("projection", "one without digits", name);
  const std::string a = keys.word("a"), b = keys.word("b");
  LoraWeight& lora = linear.lora[adapter];
  if (lora.rank != 0) keys.fail("projection", "once for each adapter", name + " again");
  lora = source.factors(a, b, linear.rows, linear.k);
  lora.scaling = keys.number("scaling");
}

void Program::read_block(Keys& keys, TensorSource& source, int64_t adapters) {
  Binding binding(*this, keys, source, adapters, linears_, needs_);
  blocks_.push_back(make_block(binding));
  binding.finish();
}

int64_t Program::rope_of(Keys& keys, int64_t head_dim) const {
  const std::string name = keys.word("rope");
  for (size_t i = 0; i < ropes_.size(); ++i) {
    if (ropes_[i].name != name) continue;
    if (ropes_[i].dim > head_dim)
      keys.fail("rope", "of dim " + std::to_string(head_dim) + " at most",
                std::to_string(ropes_[i].dim));
    return static_cast<int64_t>(i);
  }
  keys.fail("rope", "the name of a line rope above", name);
}

int64_t Program::add_attention(const Keys& keys, int64_t kv_heads, int64_t head_dim) {
  const auto check = [&](const char* key, int64_t first, int64_t got) {
    if (attention_layers_ != 0 && got != first)
      keys.fail(key, std::to_string(first) + ", as of the first attention block",
                std::to_string(got));
  };
  check("kv_heads", kv_heads_, kv_heads);
  check("head_dim", head_dim_, head_dim);
  kv_heads_ = kv_heads;
  head_dim_ = head_dim;
  return attention_layers_++;
}

KeptPlace Program::keep(const Keys& keys, const char* key, const std::vector<KeptBuffer>& buffers) {
  const auto found = std::ranges::find_if(
      kept_, [&](const KeptBuffer& other) { return other.name == buffers[0].name; });
  const auto first = static_cast<size_t>(found - kept_.begin());
  if (found == kept_.end()) kept_.insert(kept_.end(), buffers.begin(), buffers.end());
  for (size_t i = 0; i < buffers.size(); ++i) {
    KeptBuffer& kept = kept_[first + i];
    if (!kept.same_form(buffers[i]))
      keys.fail(key, "and all sizes of a state as of the first such block", "others");
    ++kept.layers;
  }
  return {first, kept_[first].layers - 1};
}

int64_t Program::attention_kind(const AttentionKind& kind) {
  const auto same = [&kind](const AttentionKind& other) {
    return other.heads == kind.heads && other.scale == kind.scale && other.policy == kind.policy;
  };
  const auto found = std::ranges::find_if(attention_kinds_, same);
  const int64_t number = found - attention_kinds_.begin();
  if (found == attention_kinds_.end()) {
    attention_kinds_.push_back(kind);
  } else {
    found->layers += kind.layers;
  }
  return number;
}

bool Program::chooses_pages() const {
  return std::ranges::any_of(attention_kinds_,
                             [](const AttentionKind& kind) { return kind.policy.chooses(); });
}

void Program::set_result(int64_t out_features, bool logits) {
  out_features_ = out_features;
  gives_logits_ = logits;
}

}  // namespace bitnet::engine
