// In-place writes: to key-value caches, to indexed rows, and of ones.
#include <vector>

#include "ascendcl/device.h"
#include "host_npu_formulas/formula.h"
#include "host_npu_formulas/quantization.h"

namespace host_npu {
namespace {

using Places = c10::List<std::optional<Tensor>>;

// Refuses negative indices, which PyTorch would count from the end. Phase one has no values to check.
Tensor from_the_start(const Tensor& indices) {
    TORCH_CHECK(indices.is_meta() || indices.numel() == 0 || indices.min().item<std::int64_t>() >= 0,
                "the host NPU takes no negative index");
    return indices.to(at::kLong);
}

// Writes `updates` of each row at consecutive positions of a dimension, starting at that row's index.
void scatter_update(const Out& data, const IntegerTensor& indices, const AnyTensor& updates, std::int64_t axis) {
    const auto& memory = data.in_place();
    const auto dim = c10::maybe_wrap_dim(axis, memory.dim());
    TORCH_CHECK(indices.dim() == 1, "the host NPU takes indices of one dimension only, not ", indices.dim());
    TORCH_CHECK(dim != 0, "axis cannot be the dimension of the rows, 0");
    TORCH_CHECK(memory.scalar_type() == updates.scalar_type(), "data and updates must have the same dtype");
    TORCH_CHECK(updates.dim() == memory.dim() && updates.size(0) == indices.size(0), "updates has shape ",
                updates.sizes(), " for ", indices.size(0), " indices of a tensor of shape ", memory.sizes());
    for (std::int64_t each = 0; each < memory.dim(); ++each) {
        TORCH_CHECK(each == 0 || each == dim ? updates.size(each) <= memory.size(each)
                                             : updates.size(each) == memory.size(each),
                    "updates has shape ", updates.sizes(), ", which does not fit data of shape ", memory.sizes(),
                    " in dimension ", each);
    }
    const auto first = from_the_start(indices).unsqueeze(1);
    const auto rows = at::arange(indices.size(0), first.options()).unsqueeze(1);
    const auto places = first + at::arange(updates.size(dim), first.options());
    memory.movedim(dim, 1).index_put_(Places({rows, places}), updates.movedim(dim, 1));
}
const Formula<"aclnnInplaceScatterUpdate", scatter_update> scatter_update_at_rows;

// Like scatter_update, with updates divided by the scales of their columns.
void quant_scatter(const Out& data, const IntegerTensor& indices, const Tensor& updates, const Tensor& scale,
                   const OptionalAnyTensor& zero_points, std::int64_t axis, std::int64_t quant_axis,
                   std::int64_t reduction) {
    TORCH_CHECK(axis == -2 && (quant_axis == -1 || quant_axis == updates.dim() - 1) && reduction == 1,
                "axis, quantAxis and reduction are ", axis, ", ", quant_axis, " and ", reduction,
                "; CANN takes -2, -1 (or the last one) and 1");
    const auto columns = updates.size(-1);
    TORCH_CHECK(columns % 32 == 0 || soc() == Soc::Ascend950, "updates has ", columns,
                " columns; CANN takes multiples of 32 on this chip");
    TORCH_CHECK(scale.numel() == columns && (!zero_points || zero_points->numel() == columns),
                "quantScales and quantZeroPoints have an element for each of the ", columns, " columns");
    auto scaled = updates / scale.flatten();
    if (zero_points) scaled = scaled + widened(*zero_points).flatten();
    scatter_update(data, indices, AnyTensor(saturated(scaled, at::kChar)), axis);
}
const Together kQuantScatter{{"updates", "quantScales", "quantZeroPoints"},
                             {{ACL_BF16, ACL_BF16, ACL_BF16}, {ACL_FLOAT16, ACL_FLOAT, ACL_INT32}}};
const Formula<"aclnnInplaceQuantScatter", quant_scatter> quant_scatter_at_rows{
    TensorRules{{"selfRef", {ACL_INT8}, "* * * ..."},
                {"indices", kIndices, "*"},
                {"updates", kHalves, "* * * ..."},
                {"quantScales", {ACL_BF16, ACL_FLOAT}},
                {"quantZeroPoints", {ACL_BF16, ACL_INT32}}},
    kQuantScatter};

// The last dimension of `indices` indexes the first dimensions of `data`.
void scatter_nd_update(const Out& data, const IntegerTensor& indices, const AnyTensor& updates) {
    const auto& memory = data.in_place();
    const auto dtype = memory.scalar_type();
    TORCH_CHECK(soc() != Soc::Ascend950 || (dtype != at::kShort && dtype != at::kInt), "varRef has dtype ",
                name_of(dtype), ", which CANN takes on A2 and A3 only");
    TORCH_CHECK(indices.dim() > 0 && indices.size(-1) > 0 && indices.size(-1) <= memory.dim(), "indices of shape ",
                indices.sizes(), " do not index a tensor of shape ", memory.sizes());
    auto written = indices.sizes().slice(0, indices.dim() - 1).vec();
    const auto rest = memory.sizes().slice(indices.size(-1));
    written.insert(written.end(), rest.begin(), rest.end());
    TORCH_CHECK(updates.sizes() == at::IntArrayRef(written), "updates has shape ", updates.sizes(), " instead of ",
                at::IntArrayRef(written), ", for indices of shape ", indices.sizes(), " of a tensor of shape ",
                memory.sizes());
    Places places;
    for (const auto& each : from_the_start(indices).unbind(-1)) places.push_back(each);
    memory.index_put_(places, updates);
}
const Formula<"aclnnScatterNdUpdate", scatter_nd_update> scatter_nd{
    {"varRef", kFloats | Dtypes{ACL_INT8, ACL_INT64, ACL_BOOL} | newer({ACL_INT16, ACL_INT32})},
    {"indices", kIndices, "* ... *"},
    {"updates", as("varRef")},
};

// Like scatter_update, with one tensor per row. Rows with a `mask` of 0 are unchanged.
void scatter_list(const std::vector<Out>& data, const IntegerTensor& indices, const AnyTensor& updates,
                  const OptionalIntegerTensor& mask, const std::string& reduce, std::int64_t axis) {
    TORCH_CHECK(reduce == "update", "the host NPU has the reduction update only, not ", reduce);
    TORCH_CHECK(indices.dim() == 1, "the host NPU takes indices of one dimension only, not ", indices.dim());
    TORCH_CHECK(axis < 0, "the host NPU takes a negative axis only, not ", axis);
    const auto count = static_cast<std::int64_t>(data.size());
    TORCH_CHECK(indices.size(0) == count && updates.size(0) == count, "there are ", count, " tensors, ",
                indices.size(0), " indices and ", updates.size(0), " updates");
    for (std::int64_t row = 0; row < count; ++row) {
        const auto& memory = data[row].in_place();
        const auto update = updates.select(0, row);
        TORCH_CHECK(memory.scalar_type() == update.scalar_type(), "data and updates must have the same dtype");
        const auto last = memory.movedim(axis, 0);
        const auto first = from_the_start(indices.select(0, row));
        const auto places = first + at::arange(update.size(axis), first.options());
        auto moved = update.movedim(axis, 0);
        if (mask) moved = at::where(mask->select(0, row) != 0, moved, last.index(Places({places})));
        last.index_put_(Places({places}), moved);
    }
}
const Formula<"aclnnScatterList", scatter_list> scatter_of_list;

// Writes each token to its slot in the blocks. Negative slots, as serving pads with -1, are skipped.
void write_slots(const Out& cache, const AnyTensor& tokens, const IntegerTensor& slots, bool fractal) {
    if (slots.is_meta()) return;
    auto blocks = cache.in_place();
    if (blocks.dim() == 5) blocks = blocks.flatten(1, 2);
    if (fractal) blocks = blocks.permute({0, 2, 1, 3});
    const auto is_kept = slots.ge(0);
    const auto slot = slots.to(at::kLong).index({is_kept});
    const auto block = slot.div(blocks.size(1), "floor");
    blocks.index_put_(Places({block, slot - block * blocks.size(1)}),
                      tokens.reshape({-1, blocks.size(2), blocks.size(3)}).index({is_kept}));
}

// Returns the shape of a cache in PA_NZ, whose heads are split into fragments of 32 bytes.
std::string fragments_of(const char* name, const AnyTensor& tokens) {
    const auto fragment = 32 / static_cast<std::int64_t>(tokens.element_size()), heads = tokens.size(1),
               size = tokens.size(2);
    TORCH_CHECK(size % fragment == 0, name, " has heads of ", size, " elements; CANN takes multiples of 32 bytes");
    const auto parts = std::to_string(size / fragment), end = " S " + std::to_string(fragment);
    return "P " + std::to_string(heads * size / fragment) + end + " | P N " + parts + end;
}

void scatter_pa_kv_cache(const AnyTensor& key, const Out& key_cache, const IntegerTensor& slots, const AnyTensor& value,
                         const Out& value_cache, const OptionalIntegerTensor& compress_lens,
                         const OptionalIntegerTensor& compress_offsets, const OptionalIntegerTensor& seq_lens,
                         const std::string& cache_mode, const std::string& scatter_mode,
                         const std::vector<std::int64_t>&, const std::vector<std::int64_t>&) {
    TORCH_CHECK(!compress_lens && !compress_offsets && !seq_lens, "the host NPU does not compress a cache");
    TORCH_CHECK(cache_mode.empty() || cache_mode == "Norm" || cache_mode == "PA_NZ",
                "the host NPU has the cache modes Norm and PA_NZ only, not ", cache_mode);
    TORCH_CHECK(scatter_mode.empty() || scatter_mode == "None", "the host NPU has the scatter mode None only, not ",
                scatter_mode);
    TORCH_CHECK(value.scalar_type() != at::kChar || key.scalar_type() == at::kChar, "key has dtype ",
                name_of(key.scalar_type()), "; CANN takes int8 with a value of int8");
    // [blocks, tokens of a block, heads, size]; in PA_NZ, heads are in fragments.
    std::vector<Shaped> all{{"key", key.sizes(), "T N K"}, {"value", value.sizes(), "T N V"}};
    if (cache_mode == "PA_NZ") {
        all.push_back({"keyCacheRef", key_cache.sizes(), fragments_of("key", key)});
        all.push_back({"valueCacheRef", value_cache.sizes(), fragments_of("value", value)});
    } else {
        all.push_back({"keyCacheRef", key_cache.sizes(), "P S N K"});
        all.push_back({"valueCacheRef", value_cache.sizes(), "P S N V"});
    }
    require_shapes(all);
    write_slots(key_cache, key, slots, cache_mode == "PA_NZ");
    write_slots(value_cache, value, slots, cache_mode == "PA_NZ");
}
const Formula<"aclnnScatterPaKvCache", scatter_pa_kv_cache> scatter_of_blocks{
    {"key", kHalves | Dtypes{ACL_INT8}, "T N K"},   {"keyCacheRef", as("key")},     {"slotMapping", kIndices, "T"},
    {"value", kHalves | Dtypes{ACL_INT8}, "T N V"}, {"valueCacheRef", as("value")}, {"compressLensOptional", kIndices},
    {"compressSeqOffsetOptional", kIndices},        {"seqLensOptional", kIndices},
};

void scatter_pa_cache(const AnyTensor& key, const Out& cache, const IntegerTensor& slots,
                      const OptionalIntegerTensor& compress_lens, const OptionalIntegerTensor& compress_offsets,
                      const OptionalIntegerTensor& seq_lens, const std::string& cache_mode) {
    TORCH_CHECK(!compress_lens && !compress_offsets && !seq_lens, "the host NPU does not compress a cache");
    TORCH_CHECK(cache_mode.empty() || cache_mode == "Norm", "the host NPU has the cache mode Norm only here, not ",
                cache_mode);
    TORCH_CHECK(cache.dtype() == key.scalar_type(), "a cache and its tokens must have the same dtype");
    require_shapes({{"key", key.sizes(), "T N K"},
                    {"keyCacheRef", cache.sizes(), "P S N K"},
                    {"slotMapping", slots.sizes(), "T"}});
    write_slots(cache, key, slots, false);
}
const Formula<"aclnnScatterPaCache", scatter_pa_cache> scatter_of_keys;

// Gathers the tokens of each sequence from its blocks, sequence by sequence. An offset is rounded down to its block.
void gather_blocks(const AnyTensor& cache, const IntegerTensor& tables, const std::vector<std::int64_t>& lengths,
                   const std::vector<std::int64_t>& offsets, const Out& tokens) {
    const auto& memory = tokens.in_place();
    const auto slots = cache.flatten(0, 1);
    const auto block_size = cache.size(1);
    std::int64_t first = 0;
    for (std::size_t row = 0; row < lengths.size(); ++row) {
        const auto at_row = tables.select(0, static_cast<std::int64_t>(row)).to(at::kLong);
        const auto start = offsets[row] / block_size * block_size;
        const auto places = at::arange(start, start + lengths[row], at_row.options());
        const auto blocks = at_row.index({places.div(block_size, "floor")});
        require_indices("blockTables", blocks, cache.size(0));
        const auto slot = blocks * block_size + places.remainder(block_size);
        memory.slice(0, first, first + lengths[row]).copy_(slots.index({slot}));
        first += lengths[row];
    }
}

std::vector<std::int64_t> numbers_of(const Tensor& x) {
    const auto wide = x.to(at::kLong).contiguous();
    return {wide.const_data_ptr<std::int64_t>(), wide.const_data_ptr<std::int64_t>() + wide.numel()};
}

void gather_pa_kv_cache(const AnyTensor& key_cache, const AnyTensor& value_cache, const IntegerTensor& tables,
                        const IntegerTensor& lengths, const Out& key, const Out& value,
                        const OptionalIntegerTensor& offsets, const std::string& mode, bool cumulative) {
    TORCH_CHECK(mode.empty() || mode == "Norm", "the host NPU gathers from the cache mode Norm only, not ", mode);
    require_shapes({{"keyCache", key_cache.sizes(), "P S N K"},
                    {"valueCache", value_cache.sizes(), "P S N V"},
                    {"blockTables", tables.sizes(), "B *"},
                    {"seqLens", lengths.sizes(), "*"},
                    {"keyRef", key.sizes(), "T N K"},
                    {"valueRef", value.sizes(), "T N V"}});
    if (offsets) require_shapes({{"blockTables", tables.sizes(), "B *"}, {"seqOffset", offsets->sizes(), "B"}});
    TORCH_CHECK(lengths.size(0) == tables.size(0) + (cumulative ? 1 : 0), "seq_lens has ", lengths.size(0),
                " elements for ", tables.size(0), " sequences");
    if (lengths.is_meta()) return;
    const auto each = numbers_of(cumulative ? lengths.diff() : Tensor(lengths));
    const auto shifts = offsets ? numbers_of(*offsets) : std::vector<std::int64_t>(each.size(), 0);
    gather_blocks(key_cache, tables, each, shifts, key);
    gather_blocks(value_cache, tables, each, shifts, value);
}
const Formula<"aclnnGatherPaKvCache", gather_pa_kv_cache> gather_of_blocks;

void ones(const Out& tensor) { tensor.in_place().fill_(1); }
const Formula<"aclnnInplaceOne", ones> fill_with_ones;

}  // namespace
}  // namespace host_npu
