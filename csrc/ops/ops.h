// Declarations of the CPU implementations behind the catalogue, in its order; csrc/ops.cpp
// documents each, and is all that includes this beside the implementations. Must not know how any
// of them works.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/torch_views.h"

namespace bitnet::ops {

Tensor pack(const Tensor& codes);
Tensor unpack(const Tensor& weight, int64_t in_features);
Tensor prepack(const Tensor& weight, int64_t in_features, std::string format);
Tensor unprepack(const Tensor& weight, int64_t out_features, int64_t in_features);
std::tuple<Tensor, Tensor> quantize_weights(const Tensor& weight);

std::tuple<Tensor, Tensor> quantize_activations(const Tensor& x);

Tensor gemv(const Tensor& weight, const Tensor& x, std::optional<Tensor> x_scale,
            std::optional<Tensor> weight_scale, std::optional<int64_t> out_features,
            std::optional<int64_t> in_features);
Tensor gemm(const Tensor& weight, const Tensor& x, std::optional<Tensor> x_scale,
            std::optional<Tensor> weight_scale, std::optional<int64_t> out_features,
            std::optional<int64_t> in_features);
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
              std::optional<Tensor> bias, std::optional<int64_t> out_features,
              std::optional<int64_t> in_features);
Tensor group_linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                    std::optional<Tensor> bias, std::optional<int64_t> out_features,
                    std::optional<int64_t> in_features);

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double eps);
Tensor relu2_mul(const Tensor& gate, const Tensor& up);
Tensor silu_and_mul(const Tensor& x);
Tensor rope_table(const Tensor& positions, int64_t head_dim, double theta);
Tensor rope(const Tensor& x, const Tensor& cos_sin);

std::tuple<Tensor, Tensor, Tensor> qkv_forward(const Tensor& x, const Tensor& norm_weight,
                                               const Tensor& q_weight, const Tensor& q_scale,
                                               const Tensor& k_weight, const Tensor& k_scale,
                                               const Tensor& v_weight, const Tensor& v_scale,
                                               double eps, std::vector<int64_t> out_features,
                                               std::optional<int64_t> in_features);
Tensor mlp_forward(const Tensor& x, const Tensor& norm_weight, const Tensor& gate_weight,
                   const Tensor& gate_scale, const Tensor& up_weight, const Tensor& up_scale,
                   std::optional<Tensor> sub_norm_weight, const Tensor& down_weight,
                   const Tensor& down_scale, double eps, std::string activation,
                   std::vector<int64_t> out_features, std::vector<int64_t> in_features);

Tensor attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                 const Tensor& start_positions, double scale, std::optional<Tensor> key_scale,
                 std::optional<Tensor> value_scale);
void kv_cache_update(Tensor key_cache, Tensor value_cache, const Tensor& key, const Tensor& value,
                     const Tensor& start_positions, std::optional<Tensor> key_scale,
                     std::optional<Tensor> value_scale);

std::tuple<Tensor, Tensor> quantize_head(const Tensor& weight, std::string format,
                                         int64_t group_size);
Tensor lm_head(const Tensor& x, const Tensor& weight, std::optional<Tensor> scale,
               std::optional<int64_t> out_features, std::optional<int64_t> in_features);
Tensor embedding(const Tensor& ids, const Tensor& weight, std::optional<Tensor> scale,
                 std::optional<int64_t> out_features, std::optional<int64_t> in_features);

Tensor decode_step(const Tensor& x, std::vector<Tensor> weights, const Tensor& scales,
                   const Tensor& gains, const Tensor& head_weight, std::optional<Tensor> head_scale,
                   Tensor key_cache, Tensor value_cache, const Tensor& start_positions,
                   ScalarType dtype, int64_t heads, int64_t inner, int64_t vocab, bool sub_norms,
                   std::string activation, double eps, double rope_theta, double scale,
                   int64_t logits_to_keep, std::optional<Tensor> key_scale,
                   std::optional<Tensor> value_scale);

Tensor probe_read(const Tensor& buffer, int64_t streams, int64_t distance);
Tensor probe_int8_peak(const Tensor& seed, int64_t iterations);

}  // namespace bitnet::ops
