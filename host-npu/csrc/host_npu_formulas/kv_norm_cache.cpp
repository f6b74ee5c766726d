// Keys and values of latent attention: RmsNorm of one part, rotation of the other, and both into their caches.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/where.h>

#include "host_npu_formulas/formula.h"
#include "host_npu_formulas/rotary.h"

namespace host_npu {
namespace {

// Rows [batch, heads, sequence, size] go to their slots of the cache; a negative slot is none.
void write_cache(const Tensor& rows, const IntegerTensor& index, const std::string& mode, const Out& cache) {
    auto memory = cache.in_place();
    TORCH_CHECK(memory.dim() == 4 && memory.numel() > 0 && memory.size(-1) == rows.size(-1), "a cache of shape ",
                memory.sizes(), " does not take rows of ", rows.size(-1));
    TORCH_CHECK(index.numel() == rows.size(0) * rows.size(2), "index has ", index.numel(), " elements for ",
                rows.size(0) * rows.size(2), " rows");
    if (rows.is_meta()) return;
    auto slot = index.flatten().to(at::kLong);
    if (mode == "Norm") {
        // [batch, heads, places, size], of which a row's index is the place.
        const auto batch = at::arange(rows.size(0), slot.options()).repeat_interleave(rows.size(2));
        TORCH_CHECK(slot.lt(memory.size(2)).all().item<bool>(), "an index is past the ", memory.size(2), " places");
        slot = at::where(slot.lt(0), slot, slot + batch * memory.size(2));
        memory = memory.transpose(1, 2);
    }
    // [blocks, places, heads, size]
    const auto tokens = rows.transpose(1, 2).reshape({-1, rows.size(1), rows.size(3)}).to(memory.scalar_type());
    const auto places = memory.size(1);
    for (std::int64_t row = 0; row < tokens.size(0); ++row) {
        const auto at = slot[row].item<std::int64_t>();
        if (at >= 0) memory.select(0, at / places).select(0, at % places).copy_(tokens[row]);
    }
}

void kv_norm_v2(const Tensor& kv, const Tensor& gamma, const Tensor& cos, const Tensor& sin, const IntegerTensor& index,
                const Out& key_cache, const Out& value_cache, Without<"k_rope_scale">, Without<"c_kv_scale">,
                Without<"k_rope_offset">, Without<"c_kv_offset">, Without<"v">, double epsilon, const std::string& mode,
                bool with_rows, const OptionalOut& key_out, const OptionalOut& value_out) {
    TORCH_CHECK(mode == "Norm" || mode == "PA" || mode == "PA_BNSD",
                "the host NPU has the cache modes Norm, PA and PA_BNSD only, not ", mode);
    TORCH_CHECK(kv.dim() == 4 && gamma.dim() == 1 && gamma.size(0) < kv.size(-1), "kv of shape ", kv.sizes(),
                " does not fit gamma of shape ", gamma.sizes());
    require_shapes({{"cos", cos.sizes(), "...cos"}, {"sin", sin.sizes(), "...cos"}});
    const auto size = gamma.size(0);
    const auto parts = kv.split_with_sizes({size, kv.size(-1) - size}, -1);
    const auto value = parts[0] * at::rsqrt(parts[0].square().mean(-1, true) + epsilon) * gamma;
    const auto key = rotated_sorted(parts[1], cos, sin);
    write_cache(key, index, mode, key_cache);
    write_cache(value, index, mode, value_cache);
    if (!with_rows) return;
    *key_out = key;
    *value_out = value;
}
const Formula<"aclnnKvRmsNormRopeCacheV2", kv_norm_v2> kv_norm_with_values;

void kv_norm(const Tensor& kv, const Tensor& gamma, const Tensor& cos, const Tensor& sin, const IntegerTensor& index,
             const Out& key_cache, const Out& value_cache, Without<"k_rope_scale">, Without<"c_kv_scale">,
             Without<"k_rope_offset">, Without<"c_kv_offset">, double epsilon, const std::string& mode, bool with_rows,
             const OptionalOut& key_out, const OptionalOut& value_out) {
    kv_norm_v2(kv, gamma, cos, sin, index, key_cache, value_cache, {}, {}, {}, {}, {}, epsilon, mode, with_rows,
               key_out, value_out);
}
const Formula<"aclnnKvRmsNormRopeCache", kv_norm> kv_norm_and_rope;

}  // namespace
}  // namespace host_npu
