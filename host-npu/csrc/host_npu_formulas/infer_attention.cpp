// Attention for inference: PromptFlashAttention, IncreFlashAttention and FusedInferAttentionScore, without
// quantization.
#include <algorithm>
#include <limits>
#include <set>

#include "host_npu_formulas/attention.h"

namespace host_npu {
namespace {

// The rules of all functions. `between` are those of the arguments between mask and result.
TensorRules inference_rules(const TensorRules& between = {}, const TensorRules& after = {}) {
    TensorRules rules{{"query", kHalves, "* * * | * * * *"},
                      {"key", as("query"), "* * * | * * * * | * * * * 16"},
                      {"value", as("query"), "* * * | * * * * | * * * * 16"},
                      {"pseShiftOptional", kHalves},
                      {"attenMaskOptional", {ACL_BOOL, ACL_INT8, ACL_UINT8}}};
    rules.insert(rules.end(), between.begin(), between.end());
    rules.push_back({"attentionOut", kHalves});
    rules.insert(rules.end(), after.begin(), after.end());
    return rules;
}
const TensorRules kTable{{"blockTableOptional", {ACL_INT32}, "* *"}};
const TensorRules kTableAndRope{{"blockTableOptional", {ACL_INT32}, "* *"},
                                {"queryRopeOptional", as("query"), "* * 64 | * * * 64 | * * *"},
                                {"keyRopeOptional", as("key"), "* * 64 | * * * 64 | * * * | * * 4 * 16"}};

const TensorRules kTableRopeAndSink{
    kTableAndRope[0], kTableAndRope[1], kTableAndRope[2], {"learnableSinkOptional", as("query"), "*"}};

// The size of the part of a head that is passed as a separate tensor.
constexpr std::int64_t kRope = 64;

// The arguments of all functions. Unread ones control the precision of CANN.
struct Inference : Setting {
    Tensor query, key, value;
    std::vector<Tensor> key_list, value_list;
    OptionalTensor query_rope, key_rope, pse;
    OptionalIntegerTensor mask, table;
    // For example, BNSD_NBSD is the layout BNSD with results in NBSD.
    std::string layout_of_out;
    Ints queries, keys;
    std::int64_t heads_of_keys;
    std::int64_t block_size;
    bool with_lse;
    Out out;
    OptionalOut lse;
    Without<"quantization"> scale_of_quantization;
    Without<"padding sizes"> padding;
    Without<"a shared prefix"> shared;
    std::int64_t unread;
    Ints unread_ints;

    std::int64_t batches() const {
        if (packed()) return static_cast<std::int64_t>(queries.size());
        return layout == "NSD" ? 1 : query.size(0);
    }
};

void require_inference(const Inference& call) {
    TORCH_CHECK(call.mode >= 0 && call.mode <= 4, "the host NPU has the sparse modes 0 to 4 only, not ", call.mode);
    TORCH_CHECK(call.mode == 0 || call.mask, "the sparse mode ", call.mode, " needs a mask, attenMask");
    TORCH_CHECK(call.query_rope.has_value() == call.key_rope.has_value(),
                "queryRope and keyRope must be given together");
    TORCH_CHECK(!call.sink || call.sink->size(0) == call.heads, "learnableSink has ",
                call.sink ? call.sink->size(0) : 0, " elements instead of one for each of ", call.heads, " heads");
    TORCH_CHECK(!call.sink || !call.with_lse, "the host NPU takes no learnableSink with softmaxLse");
    TORCH_CHECK(!call.packed() || (!call.queries.empty() && !call.keys.empty() && !call.pse),
                "the layout TND needs the lengths of queries and keys, and supports no pse");
    TORCH_CHECK(!call.table || !call.keys.empty(), "a block table needs the lengths of the keys");
}

// Whether there is a single query per batch; false for packed tokens.
bool is_one_query(const Inference& call) {
    return !call.packed() && call.query.size(call.layout == "BSH" || call.layout == "BSND" ? 1 : -2) == 1;
}

void require_heads(const Inference& call) {
    const auto of_keys = call.heads_of_keys;
    TORCH_CHECK(call.heads > 0 && of_keys > 0 && call.heads % of_keys == 0, "numKeyValueHeads is ", of_keys,
                ", which does not divide numHeads, ", call.heads);
    // Heads are a dimension of their own, or part of the last dimension.
    const auto require = [&](const char* name, const Tensor& x, const char* argument, std::int64_t heads,
                             std::size_t dimension) {
        TORCH_CHECK(dimension == std::string::npos ? x.size(-1) % heads == 0
                                                   : x.size(static_cast<std::int64_t>(dimension)) == heads,
                    argument, " is ", heads, ", and ", name, " of shape ", x.sizes(), " does not have as many heads");
    };
    const auto of_queries = call.layout.find('N');
    const auto in_blocks = call.key.dim() == 4 ? 1 : std::string::npos;
    require("query", call.query, "numHeads", call.heads, of_queries);
    require("key", call.key, "numKeyValueHeads", of_keys, call.table ? in_blocks : of_queries);
}

void require_block_size(const Inference& call) {
    if (!call.table) return;
    TORCH_CHECK(call.block_size > 0 && call.block_size == call.key.size(-2), "blockSize is ", call.block_size,
                ", and a block of key of shape ", call.key.sizes(), " has ", call.key.size(-2), " tokens");
}

// Keys and values have the same shape, except for heads of 192 and 128 elements in the layout TND.
void require_tensors(const Inference& call) {
    const auto& layout = call.layout;
    // Blocks: their number, and the tokens of a block.
    const std::string blocks = call.key.dim() == 4 ? "PNLD" : "PLH";
    const auto of_keys = call.table ? blocks : layout;
    const auto rope = std::to_string(call.heads_of_keys * kRope), queries_rope = std::to_string(call.heads * kRope);
    const bool is_narrow = call.packed() && !call.table && call.key.size(-1) == 192 && call.value.size(-1) == 128;
    const auto of_values = is_narrow ? "128" : "D";
    std::vector<Shaped> all{{"query", call.query.sizes(), shape_in(layout, "1", "D", "H1")},
                            {"key", call.key.sizes(), shape_in(of_keys, "2", "D", "H2")},
                            {"value", call.value.sizes(), shape_in(of_keys, "2", of_values, "H2")}};
    if (call.table) all.push_back({"blockTable", call.table->sizes(), std::to_string(call.batches()) + " *"});
    if (call.query_rope) {
        const auto size = std::to_string(kRope);
        all.push_back({"queryRope", call.query_rope->sizes(), shape_in(layout, "1", size, queries_rope)});
        all.push_back({"keyRope", call.key_rope->sizes(), shape_in(of_keys, "2", size, rope)});
    }
    require_shapes(all);
    require_heads(call);
    const auto heads_of_query = layout.ends_with('H') ? call.query.size(-1) / call.heads : call.query.size(-1);
    const auto heads_of_key = of_keys.ends_with('H') ? call.key.size(-1) / call.heads_of_keys : call.key.size(-1);
    TORCH_CHECK(call.packed() || is_one_query(call) || heads_of_query % 16 == 0, "query of shape ", call.query.sizes(),
                " has heads of ", heads_of_query, " elements; CANN takes multiples of 16, except for a single query");
    TORCH_CHECK(heads_of_query == heads_of_key, "key of shape ", call.key.sizes(), " has heads of ", heads_of_key,
                " elements, and query of shape ", call.query.sizes(), " has heads of ", heads_of_query);
}

// CANN takes one length for all batches, or at least one per batch.
void require_lengths(const char* name, const Ints& lengths, std::int64_t batches, std::int64_t most) {
    const auto count = static_cast<std::int64_t>(lengths.size());
    TORCH_CHECK(count <= 1 || count >= batches, name, " has ", count, " numbers for ", batches,
                " batches; CANN takes one, or one for each");
    for (const auto each : lengths) {
        TORCH_CHECK(each >= 0 && each <= most, name, " is ", at::IntArrayRef(lengths), "; CANN takes 0 to ", most,
                    " tokens");
    }
}

void require_sequences(const Inference& call) {
    if (call.packed()) require_ends("actualSeqLengths", call.queries, "query", call.query);
    if (call.packed() && !call.table) {
        require_ends("actualSeqLengthsKv", call.keys, "key", call.key);
        TORCH_CHECK(call.queries.size() == call.keys.size(), "actualSeqLengths has ", call.queries.size(),
                    " numbers and actualSeqLengthsKv ", call.keys.size(), "; CANN takes the same number of sequences");
        return;
    }
    const auto tokens = static_cast<std::int64_t>(call.layout.find('S'));
    if (!call.packed()) require_lengths("actualSeqLengths", call.queries, call.batches(), call.query.size(tokens));
    const auto of_keys = call.table ? call.table->size(1) * call.key.size(-2) : call.key.size(tokens);
    require_lengths("actualSeqLengthsKv", call.keys, call.batches(), of_keys);
}

// CANN accepts more rows and columns than there are queries and keys.
void require_pse(const Inference& call) {
    if (!call.pse) return;
    const auto& pse = *call.pse;
    TORCH_CHECK(pse.dim() == 4 && (pse.size(0) == 1 || pse.size(0) == call.batches()) && pse.size(1) == call.heads,
                "pseShift has shape ", pse.sizes(), " instead of [1, ", call.heads, ", ...] or [", call.batches(), ", ",
                call.heads, ", ...] with a row for each query and a column for each key");
}

// The number of tokens of a batch: its own length, the common length, or all tokens.
std::int64_t length(const Ints& lengths, std::int64_t batch, std::int64_t all) {
    if (lengths.empty()) return all;
    return lengths[lengths.size() == 1 ? 0 : static_cast<std::size_t>(batch)];
}

// Returns a sequence of a packed batch as [1, heads, sequence, size].
Tensor sequence(const Tensor& x, const Ints& ends, std::int64_t number) {
    const auto end = ends[static_cast<std::size_t>(number)];
    const auto begin = number == 0 ? 0 : ends[static_cast<std::size_t>(number) - 1];
    return by_head(x.slice(0, begin, end), "TND", x.size(1));
}

// Returns one batch as [1, heads, sequence, size], cut to its length.
Tensor of_batch(const Tensor& x, const Ints& lengths, std::int64_t batch, std::int64_t heads, const Setting& at) {
    if (at.packed()) return sequence(x, lengths, batch);
    const auto as_batch = at.layout == "NSD" ? x.unsqueeze(0) : x;
    const auto found = by_head(as_batch.narrow(0, batch, 1), at.layout == "NSD" ? "BNSD" : at.layout, heads);
    return found.slice(2, 0, length(lengths, batch, found.size(2)));
}

// Gathers the keys of a batch from [blocks, tokens, heads * size] or [blocks, heads, tokens, size], by `table`.
Tensor of_blocks(const Tensor& x, const Inference& call, std::int64_t batch) {
    const auto blocks = x.dim() == 3 ? by_head(x, "BSH", call.heads_of_keys) : x;
    const auto tokens = blocks.size(2);
    const auto wanted = length(call.keys, batch, call.table->size(1) * tokens);
    const auto numbers = call.table->select(0, batch).slice(0, 0, (wanted + tokens - 1) / tokens);
    require_indices("blockTable", numbers, blocks.size(0));
    return blocks.index({numbers.to(at::kLong)}).transpose(0, 1).flatten(1, 2).slice(1, 0, wanted).unsqueeze(0);
}

Tensor keys_of_batch(const Tensor& x, const Inference& call, std::int64_t batch) {
    const auto keys = call.table ? of_blocks(x, call, batch) : of_batch(x, call.keys, batch, call.heads_of_keys, call);
    return repeated(keys, call.heads);
}

// Returns a batch's part of a tensor of scores or a mask.
Tensor batch_of(const Tensor& x, std::int64_t batch, std::int64_t queries, std::int64_t keys) {
    const auto own = x.size(0) == 1 ? x : x.narrow(0, batch, 1);
    return own.slice(2, 0, queries).slice(3, 0, keys);
}

// Returns the mask as [batches or 1, 1, queries, keys]; a triangle is unchanged. A single query may have no dimension.
OptionalIntegerTensor mask_of_batch(const Inference& call, std::int64_t batch, const Inputs& in) {
    if (!call.mask || call.mode >= 2) return call.mask;
    const auto& mask = *call.mask;
    TORCH_CHECK(!call.packed(), "the host NPU takes a mask of the sparse modes 2 to 4 in the layout TND only");
    Tensor whole = mask;
    if (is_one_query(call)) {
        whole = mask.reshape({-1, 1, 1, mask.size(-1)});
    } else if (mask.dim() < 4) {
        whole = mask.dim() == 2 ? mask.unsqueeze(0).unsqueeze(0) : mask.unsqueeze(1);
    }
    TORCH_CHECK(whole.dim() == 4 && (whole.size(0) == 1 || whole.size(0) == call.batches()) && whole.size(1) == 1,
                "attenMask has shape ", mask.sizes(), " for ", call.batches(),
                " batches; CANN takes one mask, or one for each, and no dimension of heads but 1");
    return IntegerTensor(batch_of(whole, batch, in.query.size(2), in.key.size(2)));
}

Inputs inputs_of_batch(const Inference& call, std::int64_t batch) {
    auto query = of_batch(call.query, call.queries, batch, call.heads, call);
    auto key = keys_of_batch(call.key, call, batch);
    if (call.query_rope) {
        query = at::cat({query, of_batch(*call.query_rope, call.queries, batch, call.heads, call)}, -1);
        key = at::cat({key, keys_of_batch(*call.key_rope, call, batch)}, -1);
    }
    return {query, key, keys_of_batch(call.value, call, batch), call.heads_of_keys, std::nullopt};
}

// Concatenates all batches, and fills the rows past a batch's length with `value`.
Tensor together(const std::vector<Tensor>& batches, std::int64_t rows, const Setting& at, double value = 0) {
    std::vector<Tensor> parts;
    for (const auto& each : batches) {
        const auto missing = rows - each.size(2);
        parts.push_back(at.packed() ? in_layout(each, "TND") : at::constant_pad_nd(each, {0, 0, 0, missing}, value));
    }
    return at::cat(parts);
}

Tensor log_of_sum(const Forward& each) {
    TORCH_CHECK(each.sum.is_meta() || each.sum.gt(0).all().item<bool>(),
                "the host NPU has no softmax_lse of a query that attends to nothing");
    return each.max + at::log(each.sum);
}

// For a single query, CANN ignores the sparse mode and the band, but not the mask.
Inference without_band(Inference call) {
    if (!is_one_query(call) || call.query_rope) return call;
    if (!call.mask) call.mode = 0;
    TORCH_CHECK(call.mode != 2 && call.mode != 4, "the host NPU has no sparse mode ", call.mode,
                " of a single query, which CANN ignores: use 0");
    call.before = call.after = std::numeric_limits<std::int32_t>::max();
    return call;
}

// Splits the layout into that of queries and of keys not in blocks, and that of results.
void split_layout(Inference& call) {
    static const std::set<std::string> known{"BSH",       "BSND",      "BNSD",     "NSD",       "TND",
                                             "NTD",       "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "BSH_NBSD",
                                             "BSND_NBSD", "BNSD_NBSD", "TND_NTD",  "NTD_TND"};
    TORCH_CHECK(known.contains(call.layout), "the host NPU has the layouts ", c10::Join(", ", known), " only, not ",
                call.layout);
    const auto end = call.layout.find('_');
    call.layout_of_out = end == std::string::npos ? call.layout : call.layout.substr(end + 1);
    call.layout = call.layout.substr(0, end);
    if (call.layout != "NTD") return;
    TORCH_CHECK(!call.table, "the layout NTD takes no block table");
    call.layout = "TND";
    for (auto* const x : {&call.query, &call.key, &call.value}) *x = x->transpose(0, 1);
    for (auto* const x : {&call.query_rope, &call.key_rope}) {
        if (*x) x->emplace((*x)->transpose(0, 1));
    }
}

// Views keys in blocks of tiles, [blocks, heads, tiles, tokens, 16], as [blocks, heads, tokens, size].
void join_tiles(Inference& call) {
    const auto join = [&](const Tensor& x) {
        TORCH_CHECK(x.dim() < 5 || call.table, "keys and values of 5 dimensions need a block table");
        return x.dim() < 5 ? x : x.transpose(2, 3).flatten(3);
    };
    for (auto* const x : {&call.key, &call.value}) *x = join(*x);
    if (call.key_rope) call.key_rope.emplace(join(*call.key_rope));
}

// Converts [batches, heads, sequence, size], or [tokens, heads, size], to the layout of the results.
Tensor in_layout_of_out(const Tensor& x, const Inference& call) {
    const auto& layout = call.layout_of_out;
    if (layout == "NSD") return x.squeeze(0);
    if (layout == "NBSD" || layout == "NTD") return x.transpose(0, 1);
    return call.packed() ? x : in_layout(x, layout);
}

void infer(const Inference& given) {
    auto whole = given;
    split_layout(whole);
    join_tiles(whole);
    auto call = without_band(whole);
    call.pse_type = 0;
    if (call.heads_of_keys == 0) call.heads_of_keys = call.heads;
    // Without with_lse, programs pass a tensor of any dtype.
    TORCH_CHECK(!call.with_lse || !call.lse || call.lse->dtype() == at::kFloat, "softmaxLse has dtype ",
                name_of(call.lse->dtype()), " instead of float32");
    require_inference(call);
    require_tensors(call);
    require_block_size(call);
    require_sequences(call);
    require_pse(call);
    std::vector<Tensor> results, logs;
    for (std::int64_t batch = 0; batch < call.batches(); ++batch) {
        const auto in = inputs_of_batch(call, batch);
        const auto pse =
            call.pse ? OptionalTensor(batch_of(*call.pse, batch, in.query.size(2), in.key.size(2))) : std::nullopt;
        const auto each = attention(in, pse, mask_of_batch(call, batch, in), call);
        results.push_back(each.result);
        if (call.with_lse) logs.push_back(log_of_sum(each));
    }
    const auto rows = call.query.size(call.layout == "BSH" || call.layout == "BSND" ? 1 : -2);
    call.out = in_layout_of_out(together(results, rows, call), call);
    if (call.with_lse && call.lse) *call.lse = together(logs, rows, call, std::numeric_limits<double>::infinity());
}

void infer_of_lists(const Inference& given) {
    auto call = given;
    TORCH_CHECK(call.key_list.size() == 1 && call.value_list.size() == 1,
                "the host NPU takes one tensor of keys and one of values only, not ", call.key_list.size(), " and ",
                call.value_list.size());
    call.key = call.key_list.front();
    call.value = call.value_list.front();
    infer(call);
}

void increment(const Inference& given) {
    auto call = given;
    call.before = call.after = 2147483647;
    TORCH_CHECK(call.query.size(call.layout == "BNSD" ? 2 : 1) == 1, "the query of shape ", call.query.sizes(),
                " is not one token");
    TORCH_CHECK(!call.table || (call.block_size > 0 && call.block_size <= 512 && call.block_size % 16 == 0),
                "blockSize is ", call.block_size, "; CANN takes the multiples of 16 up to 512");
    infer_of_lists(call);
}

constexpr Members<&Inference::query, &Inference::key_list, &Inference::value_list, &Inference::pse, &Inference::mask>
    kInferenceInputs;
constexpr Members<&Inference::scale_of_quantization, &Inference::scale_of_quantization> kTwoScales;
constexpr auto kFourScales = kTwoScales + kTwoScales;
constexpr auto kFiveScales = kFourScales + Members<&Inference::scale_of_quantization>{};
constexpr auto kSevenScales = kFiveScales + kTwoScales;
constexpr Members<&Inference::heads, &Inference::scale, &Inference::before, &Inference::after, &Inference::layout,
                  &Inference::heads_of_keys, &Inference::mode>
    kInferenceWindow;
constexpr auto kFused = kInferenceInputs + Members<&Inference::queries, &Inference::keys>{} + kSevenScales +
                        Members<&Inference::table, &Inference::padding, &Inference::padding>{} + kFourScales +
                        Members<&Inference::shared, &Inference::shared, &Inference::unread_ints, &Inference::query_rope,
                                &Inference::key_rope>{};
constexpr auto kFusedSettings =
    kInferenceWindow + Members<&Inference::unread, &Inference::block_size, &Inference::unread, &Inference::with_lse>{};

const Formula<"aclnnPromptFlashAttentionV3",
              collected<infer, &Inference::query, &Inference::key, &Inference::value, &Inference::pse, &Inference::mask,
                        &Inference::queries, &Inference::keys, kFiveScales, kInferenceWindow, &Inference::unread,
                        &Inference::out>>
    attention_of_prompts{inference_rules()};
const Formula<"aclnnIncreFlashAttentionV4",
              collected<increment, kInferenceInputs, &Inference::keys, kSevenScales, &Inference::table,
                        &Inference::padding, &Inference::heads, &Inference::scale, &Inference::layout,
                        &Inference::heads_of_keys, &Inference::block_size, &Inference::unread, &Inference::out>>
    attention_of_increments{inference_rules(kTable)};
const Formula<"aclnnFusedInferAttentionScoreV3",
              collected<infer_of_lists, kFused, &Inference::scale_of_quantization, kFusedSettings, &Inference::unread,
                        &Inference::unread, &Inference::out, &Inference::lse>>
    attention_of_inference{inference_rules(kTableAndRope, {{"softmaxLse"}})};
const Formula<"aclnnFusedInferAttentionScoreV4",
              collected<infer_of_lists, kFused, kTwoScales, &Inference::sink, kFusedSettings, &Inference::unread,
                        &Inference::unread, &Inference::unread, &Inference::out, &Inference::lse>>
    attention_of_inference_v4{inference_rules(kTableRopeAndSink, {{"softmaxLse"}})};

}  // namespace
}  // namespace host_npu
