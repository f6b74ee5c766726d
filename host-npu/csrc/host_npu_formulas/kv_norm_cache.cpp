// Keys and values of latent attention: RmsNorm of one part and rotation of the other, both written to their caches; and
// MlaProlog, the computation that precedes the attention.
#include <set>

#include "host_npu_formulas/norms.h"
#include "host_npu_formulas/quantization.h"
#include "host_npu_formulas/rotary.h"

namespace host_npu {
namespace {

// Writes rows [batch, heads, sequence, size] to their slots of the cache. Negative slots are skipped.
void write_cache(const Tensor& rows, const IntegerTensor& index, const std::string& mode, const Out& cache) {
    auto memory = cache.in_place();
    TORCH_CHECK(memory.dim() == 4 && memory.numel() > 0 && memory.size(-1) == rows.size(-1), "a cache of shape ",
                memory.sizes(), " does not take rows of ", rows.size(-1));
    TORCH_CHECK(index.numel() == rows.size(0) * rows.size(2), "index has ", index.numel(), " elements for ",
                rows.size(0) * rows.size(2), " rows");
    if (rows.is_meta()) return;
    auto slot = index.flatten().to(at::kLong);
    if (mode == "Norm") {
        // The cache is [batch, heads, positions, size]; the index is the position.
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

// Writes rows [tokens, size] to their slots of a cache [blocks, positions, 1, size], whose blocks may be stored in
// columns of 32 bytes.
void write_blocks(const Tensor& rows, const IntegerTensor& index, const std::string& mode, const Out& cache) {
    const auto& memory = cache.in_place();
    const auto width = mode.ends_with("NZ") ? 32 / static_cast<std::int64_t>(memory.element_size()) : rows.size(1);
    const auto columns = memory.view({memory.size(0), -1, memory.size(1), width}).transpose(1, 2);
    write_cache(rows.reshape({1, rows.size(0), -1, width}).transpose(1, 2), index, "PA", Out(columns));
}

// Returns the slots of rows [batch, 1, sequence, size], where `index` has the slot of the first row of each block.
IntegerTensor slots_in_blocks(const IntegerTensor& index, const Tensor& rows, std::int64_t places) {
    const auto sequence = rows.size(2), blocks = (sequence + places - 1) / places;
    TORCH_CHECK(index.numel() == rows.size(0) * blocks, "index has ", index.numel(), " elements for ", rows.size(0),
                " sequences of ", blocks, " blocks");
    const auto first = index.to(at::kLong).reshape({rows.size(0), blocks, 1});
    const auto place = at::arange(places, first.options());
    // The rows start at the beginning of the block that contains the slot.
    const auto slots = at::where(first.lt(0), first, first.div(places, "floor") * places + place);
    return IntegerTensor(slots.flatten(1).slice(1, 0, sequence));
}

struct KvNorm {
    Tensor kv, gamma, cos, sin;
    IntegerTensor index;
    Out key_cache, value_cache;
    OptionalTensor key_scale, value_scale;
    Without<"k_rope_offset"> key_offset;
    Without<"c_kv_offset"> value_offset;
    Without<"v"> v;
    double epsilon;
    std::string mode;
    bool with_rows;
    OptionalOut key_out, value_out;
};

void write_rows(const Tensor& rows, const KvNorm& in, const Out& cache) {
    auto index = in.index;
    if (in.mode.starts_with("PA_BLK")) index = slots_in_blocks(index, rows, cache.sizes().at(1));
    if (!in.mode.ends_with("NZ")) return write_cache(rows, index, in.mode, cache);
    TORCH_CHECK(rows.size(1) == 1, "kv has ", rows.size(1), " heads; CANN takes 1");
    write_blocks(rows.flatten(0, 2), index, in.mode, cache);
}

// Converts rows to the cache's dtype: for int8, scales and rounds them.
Tensor as_cached(const Tensor& rows, const char* name, const OptionalTensor& scale, const Out& cache) {
    const bool is_int8 = cache.dtype() == at::kChar;
    TORCH_CHECK(is_int8 == scale.has_value() && (is_int8 || c10::isFloatingType(cache.dtype())), name, " is ",
                scale ? "given" : "absent", " for a cache of dtype ", name_of(cache.dtype()),
                "; the host NPU takes it for int8, and no other dtype that is quantized");
    if (!scale) return rows;
    const auto size = std::to_string(rows.size(-1));
    require_shapes({{name, scale->sizes(), size + " | 1 " + size}});
    return saturated(rows * *scale, at::kChar);
}

void kv_norm(const KvNorm& in) {
    static const std::set<std::string> modes{"Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"};
    TORCH_CHECK(modes.contains(in.mode), "the host NPU has the cache modes ", c10::Join(", ", modes), " only, not ",
                in.mode);
    TORCH_CHECK(in.kv.dim() == 4 && in.gamma.dim() == 1 && in.gamma.size(0) < in.kv.size(-1), "kv of shape ",
                in.kv.sizes(), " does not fit gamma of shape ", in.gamma.sizes());
    require_shapes({{"cos", in.cos.sizes(), "...cos"}, {"sin", in.sin.sizes(), "...cos"}});
    const auto size = in.gamma.size(0);
    const auto parts = in.kv.split_with_sizes({size, in.kv.size(-1) - size}, -1);
    const auto value = rms_normal(parts[0], in.gamma, in.epsilon).result;
    const auto key = rotated_sorted(parts[1], in.cos, in.sin);
    write_rows(as_cached(key, "k_rope_scale", in.key_scale, in.key_cache), in, in.key_cache);
    write_rows(as_cached(value, "c_kv_scale", in.value_scale, in.value_cache), in, in.value_cache);
    if (!in.with_rows) return;
    *in.key_out = key;
    *in.value_out = value;
}
constexpr Members<&KvNorm::kv, &KvNorm::gamma, &KvNorm::cos, &KvNorm::sin, &KvNorm::index, &KvNorm::key_cache,
                  &KvNorm::value_cache, &KvNorm::key_scale, &KvNorm::value_scale, &KvNorm::key_offset,
                  &KvNorm::value_offset>
    kKvInputs;
constexpr Members<&KvNorm::epsilon, &KvNorm::mode, &KvNorm::with_rows, &KvNorm::key_out, &KvNorm::value_out>
    kKvSettings;
const Formula<"aclnnKvRmsNormRopeCache", collected<kv_norm, kKvInputs, kKvSettings>> kv_norm_and_rope;
const Formula<"aclnnKvRmsNormRopeCacheV2", collected<kv_norm, kKvInputs, &KvNorm::v, kKvSettings>> kv_norm_with_values;

// The arguments of MlaProlog. Scales are absent for bfloat16.
struct Prolog {
    AnyTensor tokens, down_query, up_query, down_key;
    Tensor up_key, gamma_of_query, gamma_of_key, sin, cos;
    IntegerTensor index;
    OptionalTensor token_scale, down_query_scale, up_query_scale, down_key_scale, cache_scale, smooth;
    Without<"quantScaleCkr"> rope_scale;
    Without<"actualSeqLen"> lengths;
    Without<"kNopeClipAlpha"> clip;
    double epsilon_of_query, epsilon_of_key, query_factor = 1, key_factor = 1;
    std::string mode;
    std::int64_t weight_mode, cache_mode, query_mode, joined, joined_scales, unread;
    Out key_cache, rope_cache, query, query_rope;
    OptionalOut query_scale, latent, latent_scale;

    bool is_quantized() const { return tokens.scalar_type() == at::kChar; }
    // Whether the second product of the queries is in int8, even if it is the only one.
    bool quantizes_latent() const { return up_query.scalar_type() == at::kChar; }
};

// Checks the combination of dtypes and the sizes.
void require_prolog(const Prolog& in) {
    const auto hidden = in.tokens.size(-1), rank = in.down_query.size(1);
    const auto heads = in.up_key.size(0), size = in.up_key.size(1);
    TORCH_CHECK((hidden % 1024 == 0 && hidden > 0 && hidden <= 8192) || hidden == 7680, "tokenX has rows of ", hidden,
                "; CANN takes the multiples of 1024 up to 8192, and 7680");
    TORCH_CHECK(rank == 1536 || rank == 2048, "weightDq has ", rank, " columns; CANN takes 1536 or 2048");
    TORCH_CHECK(size == 128 || size == 192, "weightUk has heads of ", size, "; CANN takes 128 or 192");
    TORCH_CHECK(heads <= 128 && (heads & (heads - 1)) == 0 && in.up_query.size(1) == heads * (size + in.cos.size(-1)),
                "weightUqQr has ", in.up_query.size(1), " columns for ", heads,
                " heads; CANN takes powers of 2 up to 128, and a head and its rotated part for each");
    TORCH_CHECK(in.mode == "PA_BSND" || in.mode == "PA_NZ",
                "the host NPU has the cache modes PA_BSND and PA_NZ only, not ", in.mode);
    for (const auto* weight : {&in.down_query, &in.down_key}) {
        TORCH_CHECK(weight->scalar_type() == in.tokens.scalar_type() && (!in.is_quantized() || in.quantizes_latent()),
                    "CANN takes tokenX and all its weights in int8, weightUqQr alone, or none of them");
    }
    for (const auto* scale : {&in.token_scale, &in.down_query_scale, &in.down_key_scale, &in.up_query_scale}) {
        const bool is_int8 = scale == &in.up_query_scale ? in.quantizes_latent() : in.is_quantized();
        TORCH_CHECK(scale->has_value() == is_int8,
                    "dequantScaleX and those of the weights must be given where they "
                    "have dtype int8, and only there");
    }
    TORCH_CHECK(!in.smooth || in.quantizes_latent(), "smoothScalesCq is for weightUqQr of int8 only");
    const bool quantizes = in.key_cache.dtype() == at::kChar;
    TORCH_CHECK(quantizes == in.cache_scale.has_value() && (in.is_quantized() || !quantizes),
                "quantScaleCkv must be given where kvCache has dtype int8, as tokenX, and only there");
}

// x @ weight, exact for integers, in the dtype that the next product takes.
Tensor projected(const Tensor& x, const AnyTensor& weight, const OptionalTensor& scale,
                 const OptionalTensor& row_scale) {
    if (!scale) return at::matmul(x, widened(weight));
    return at::matmul(x.to(at::kDouble), weight.to(at::kDouble)).to(at::kFloat) * row_scale->reshape({-1, 1}) * *scale;
}

Tensor as_bfloat16(const Tensor& x) { return widened(x.to(at::kBFloat16)); }

void prolog(const Prolog& in) {
    require_prolog(in);
    const auto tokens = widened(in.tokens).flatten(0, -2);
    const auto cos = in.cos.reshape({tokens.size(0), -1}), sin = in.sin.reshape({tokens.size(0), -1});
    auto latent = projected(tokens, in.down_query, in.down_query_scale, in.token_scale);
    if (!in.is_quantized()) latent = as_bfloat16(latent);
    latent = rms_normal(latent, in.gamma_of_query, in.epsilon_of_query).result * in.query_factor;
    const bool returns_latent = in.latent && c10::multiply_integers(in.latent->sizes()) != 0;
    Tensor heads;
    if (in.quantizes_latent()) {
        const auto [whole, scale] = quantized_rows(in.smooth ? latent * *in.smooth : latent);
        heads = projected(whole, in.up_query, in.up_query_scale, scale);
        TORCH_CHECK(!returns_latent || in.latent_scale, "queryNormOut of int8 needs dequantScaleQNormOut");
        if (returns_latent) *in.latent_scale = scale.unsqueeze(-1);
        latent = whole;
    } else {
        heads = as_bfloat16(projected(as_bfloat16(latent), in.up_query, std::nullopt, std::nullopt));
    }
    if (returns_latent) *in.latent = latent.reshape(in.latent->sizes());
    const auto size = in.up_key.size(1), rope = cos.size(1);
    const auto parts = heads.view({tokens.size(0), in.up_key.size(0), -1}).split_with_sizes({size, rope}, -1);
    auto found = as_bfloat16(at::matmul(as_bfloat16(parts[0]).transpose(0, 1), in.up_key).transpose(0, 1));
    auto turned = rotated_sorted(parts[1], cos.unsqueeze(1), sin.unsqueeze(1));
    if (in.cache_scale) {
        TORCH_CHECK(in.query_scale && in.query.dtype() == at::kChar,
                    "query must have dtype int8, and dequantScaleQNope be given, "
                    "where kvCache has dtype int8");
        const auto [whole, scale] = quantized_rows(found);
        found = whole;
        turned = as_bfloat16(turned) * in.cache_scale->flatten()[0] / scale.unsqueeze(-1);
        *in.query_scale = scale.reshape(in.query_scale->sizes());
    }
    in.query = found.reshape(in.query.sizes());
    in.query_rope = turned.reshape(in.query_rope.sizes());
    const auto keys = projected(tokens, in.down_key, in.down_key_scale, in.token_scale);
    const auto rank = in.gamma_of_key.size(0);
    auto key = rms_normal(keys.slice(1, 0, rank), in.gamma_of_key, in.epsilon_of_key).result * in.key_factor;
    // CANN reads only the first scale, even if there is one per column.
    if (in.cache_scale) key = saturated(key * in.cache_scale->flatten()[0], at::kChar);
    write_blocks(key, in.index, in.mode, in.key_cache);
    write_blocks(rotated_sorted(keys.slice(1, rank), cos, sin), in.index, in.mode, in.rope_cache);
}

void prolog_v3(const Prolog& in) {
    const bool quantizes = in.cache_scale.has_value();
    TORCH_CHECK(
        in.weight_mode == in.is_quantized() + in.quantizes_latent() && in.cache_mode == quantizes &&
            in.query_mode == quantizes && in.joined == 0 && in.joined_scales == 0,
        "the host NPU has weightQuantMode 0, or 1 and 2 for int8, kvCacheQuantMode and queryQuantMode 0, or 1 with "
        "quantScaleCkv, and the other modes 0 only");
    prolog(in);
}

const Dtypes kBrain{ACL_BF16}, kBrainOrInt8{ACL_BF16, ACL_INT8};
const TensorRule kTokens{"tokenX", kBrainOrInt8, "T E | B S E"}, kDownQuery{"weightDq", kBrainOrInt8, "E Q"};
const TensorRule kUpQuery{"weightUqQr", kBrainOrInt8, "Q *"}, kUpKey{"weightUk", kBrain, "N D 512"};
const TensorRule kDownKey{"weightDkvKr", kBrainOrInt8, "E 576"}, kGammaOfQuery{"rmsnormGammaCq", kBrain, "Q"};
const TensorRule kGammaOfKey{"rmsnormGammaCkv", kBrain, "512"}, kSin{"ropeSin", kBrain, "T 64 | B S 64"};
const TensorRule kCos{"ropeCos", kBrain, "T 64 | B S 64"}, kIndex{"cacheIndex", {ACL_INT64}, "T | B S"};
const TensorRule kKeyCache{"kvCacheRef", kBrainOrInt8, "P L%16<=1024 1 512"},
    kRopeCache{"krCacheRef", kBrain, "P L 1 64"};
const TensorRule kTokenScale{"dequantScaleX", kFloat, "* | * 1"}, kDownQueryScale{"dequantScaleWDq", kFloat, "1 Q"};
const TensorRule kUpQueryScale{"dequantScaleWUqQr", kFloat, "1 *"},
    kDownKeyScale{"dequantScaleWDkvKr", kFloat, "1 576"};
const TensorRule kCacheScale{"quantScaleCkv", kFloat, "1 | 1 512"}, kSmooth{"smoothScalesCq", kFloat, "1 Q"};
const TensorRule kQuery{"queryOut", kBrainOrInt8, "T N 512 | B S N 512"}, kQueryScale{"dequantScaleQNope", kFloat};
const TensorRule kQueryRope{"queryRopeOut", kBrain, "T N 64 | B S N 64"};
const TensorRule kQueryNorm{"queryNormOut", as("weightUqQr"), "T Q | B S Q | 0"},
    kQueryNormScale{"dequantScaleQNormOut", kFloat, "* 1 | 0"};
constexpr Members<&Prolog::tokens, &Prolog::down_query, &Prolog::up_query, &Prolog::up_key, &Prolog::down_key,
                  &Prolog::gamma_of_query, &Prolog::gamma_of_key, &Prolog::sin, &Prolog::cos>
    kPrologInputs;
constexpr Members<&Prolog::token_scale, &Prolog::down_query_scale, &Prolog::up_query_scale, &Prolog::down_key_scale,
                  &Prolog::cache_scale, &Prolog::rope_scale, &Prolog::smooth>
    kPrologScales;
constexpr Members<&Prolog::epsilon_of_query, &Prolog::epsilon_of_key, &Prolog::mode> kPrologSettings;
constexpr Members<&Prolog::query, &Prolog::query_rope, &Prolog::query_scale> kPrologOuts;
const Formula<"aclnnMlaPrologV2WeightNz", collected<prolog, kPrologInputs, &Prolog::index, &Prolog::key_cache,
                                                    &Prolog::rope_cache, kPrologScales, kPrologSettings, kPrologOuts>>
    mla_prolog_v2{kTokens,       kDownQuery,    kUpQuery,    kUpKey,    kDownKey,   kGammaOfQuery, kGammaOfKey,
                  kSin,          kCos,          kIndex,      kKeyCache, kRopeCache, kTokenScale,   kDownQueryScale,
                  kUpQueryScale, kDownKeyScale, kCacheScale, kSmooth,   kQuery,     kQueryRope,    kQueryScale};
const Formula<
    "aclnnMlaPrologV3WeightNz",
    collected<prolog_v3, kPrologInputs, &Prolog::key_cache, &Prolog::rope_cache, &Prolog::index, kPrologScales,
              &Prolog::lengths, &Prolog::clip, kPrologSettings, &Prolog::weight_mode, &Prolog::cache_mode,
              &Prolog::query_mode, &Prolog::joined, &Prolog::joined_scales, &Prolog::unread, &Prolog::query_factor,
              &Prolog::key_factor, kPrologOuts, &Prolog::latent, &Prolog::latent_scale>>
    mla_prolog_v3{kTokens,       kDownQuery,     kUpQuery,    kUpKey,     kDownKey, kGammaOfQuery, kGammaOfKey,
                  kSin,          kCos,           kKeyCache,   kRopeCache, kIndex,   kTokenScale,   kDownQueryScale,
                  kUpQueryScale, kDownKeyScale,  kCacheScale, kSmooth,    kQuery,   kQueryRope,    kQueryScale,
                  kQueryNorm,    kQueryNormScale};

}  // namespace
}  // namespace host_npu
