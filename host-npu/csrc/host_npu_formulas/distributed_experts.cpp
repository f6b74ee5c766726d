// Mixtures of experts distributed over ranks: dispatch sends tokens to the ranks of their experts, combine returns the
// experts' rows. A token has a copy for each of its experts, numbered row by row as in expertIds.
//
// Every rank receives the tokens of all ranks and selects those for its experts, because their number is known on the
// device only. CANN's documents do not specify the data that dispatch passes to combine. Here it is the number of each
// copy among its rank's copies for the same expert, and the number of rows of each expert and rank.
#include "ascendcl/device.h"
#include "host_npu_formulas/communicating.h"
#include "host_npu_formulas/experts.h"
#include "host_npu_formulas/quantization.h"

namespace host_npu {
namespace {

using hccl::Function;

// The distribution of the experts: the same number on each rank, in the order of the ranks.
struct Division {
    Group group;
    std::int64_t ranks, rank, experts, other_ranks, other_rank, shard_type, shared_experts, ranks_of_shared;
    std::int64_t global_tokens;
    std::string algorithm;
    // The numbers of experts without weights: zero, copy and constant experts.
    std::int64_t zero_experts, copy_experts, constant_experts;
    Without<"elasticInfo"> elastic_info;
    Without<"performanceInfo"> performance_info;
    std::string unread_text;

    std::int64_t on_each() const { return experts / ranks; }
    std::int64_t most_tokens(std::int64_t own) const { return global_tokens == 0 ? own : global_tokens / ranks; }
};

void require_division(const Division& all) {
    TORCH_CHECK(all.zero_experts == 0 && all.copy_experts == 0 && all.constant_experts == 0,
                "the host NPU has no experts that copy or are constant");
    const auto& algorithm = all.algorithm;
    TORCH_CHECK(all.ranks == all.group.ranks, "epWorldSize is ", all.ranks, ", and the communicator \"", all.group.name,
                "\" has ", all.group.ranks, " ranks");
    TORCH_CHECK(all.ranks >= 2, "epWorldSize is 1; CANN takes 2 at least");
    TORCH_CHECK(all.rank == all.group.rank, "epRankId is ", all.rank, " on the rank ", all.group.rank,
                " of the communicator \"", all.group.name, "\"");
    TORCH_CHECK(all.experts > 0 && all.experts <= 1024 && all.experts % all.ranks == 0, "moeExpertNum is ", all.experts,
                "; CANN takes the multiples of epWorldSize, ", all.ranks, ", up to 1024");
    TORCH_CHECK(all.other_ranks <= 1 && all.other_rank == 0, "tpWorldSize is ", all.other_ranks, " and tpRankId ",
                all.other_rank, "; CANN takes 0 or 1, and 0");
    TORCH_CHECK(all.shard_type == 0, "expertShardType is ", all.shard_type, "; CANN takes 0");
    TORCH_CHECK(all.ranks_of_shared == 0, "the host NPU has no ranks of shared experts, sharedExpertRankNum is ",
                all.ranks_of_shared);
    TORCH_CHECK(all.shared_experts == 0 || all.shared_experts == 1, "sharedExpertNum is ", all.shared_experts,
                "; CANN takes 0 or 1 without ranks of shared experts");
    TORCH_CHECK(
        algorithm.empty() || algorithm == "fullmesh" || algorithm == "fullmesh_v1" || algorithm == "fullmesh_v2",
        "the host NPU has the algorithm \"fullmesh\" only, commAlg is \"", algorithm, "\"");
    TORCH_CHECK(all.global_tokens % all.ranks == 0, "globalBs is ", all.global_tokens,
                "; CANN takes 0 or epWorldSize times the most tokens of a rank");
}

// Returns the active copies. Inactive tokens are not sent. In a mask of tokens, the active ones come first.
Tensor active_copies(const OptionalIntegerTensor& mask, const Tensor& ids) {
    if (!mask) return at::ones(ids.sizes(), ids.options().dtype(at::kBool));
    if (mask->dim() == 2) {
        TORCH_CHECK(soc() != Soc::Ascend910B, "xActiveMask has shape ", mask->sizes(),
                    "; CANN takes one dimension on this chip");
        return *mask;
    }
    const auto given = mask->to(at::kLong);
    TORCH_CHECK(given.is_meta() || given.diff().le(0).all().item<bool>(),
                "xActiveMask has a token that is active behind one that is not");
    return mask->unsqueeze(1).expand(ids.sizes());
}

// The expert of each copy; `experts` for inactive copies.
Tensor expert_of_copies(const Tensor& ids, const Tensor& active, std::int64_t experts) {
    const auto wide = ids.to(at::kLong);
    require_indices("expertIds", wide.masked_fill(active.logical_not(), 0), experts);
    return at::where(active, wide, experts).flatten();
}

// The number of earlier copies for the same expert.
Tensor number_among(const Tensor& expert_of, std::int64_t experts) {
    const auto seen = at::one_hot(expert_of, experts + 1).cumsum(0);
    return seen.gather(1, expert_of.unsqueeze(1)).squeeze(1) - 1;
}

Tensor as_bytes(const Tensor& x) { return x.contiguous().view(at::kByte); }

// Unpacks rows of bytes that hold the rows of several tensors side by side.
class Packet {
  public:
    explicit Packet(const Tensor& rows) : rows_(rows) {}

    Tensor next(std::int64_t columns, at::ScalarType dtype) {
        const auto size = columns * static_cast<std::int64_t>(c10::elementSize(dtype));
        const auto begin = std::exchange(begin_, begin_ + size);
        return rows_.slice(1, begin, begin + size).contiguous().view(dtype);
    }

  private:
    Tensor rows_;
    std::int64_t begin_ = 0;
};

void write_first(const Out& out, const Tensor& rows) { out.in_place().slice(0, 0, rows.size(0)).copy_(rows); }

// Checks a call's tensors apart from their dtypes. `tokens` has the tokens of a rank.
void require_tokens(const Tensor& tokens, const IntegerTensor& ids, const Division& division) {
    const auto count = ids.size(0), size = tokens.size(1);
    const bool is_910b = soc() == Soc::Ascend910B;
    TORCH_CHECK(count > 0 && count <= (is_910b ? 256 : 512), "expertIds has ", count, " tokens; CANN takes 1 to ",
                is_910b ? 256 : 512, " on this chip");
    TORCH_CHECK(is_910b ? size > 0 && size <= 10240 && size % 32 == 0 : size >= 1024 && size <= 8192, "a token has ",
                size, " elements; CANN takes ", is_910b ? "the multiples of 32 up to 10240" : "1024 to 8192",
                " on this chip");
    TORCH_CHECK(ids.size(1) <= division.experts, "expertIds has ", ids.size(1), " of ", division.experts, " experts");
    TORCH_CHECK(count <= division.most_tokens(count), "expertIds has ", count, " tokens, and globalBs is ",
                division.global_tokens, ", of ", division.ranks, " ranks");
}

// The arguments of all versions of dispatch.
struct Dispatch : Division {
    AnyTensor x;
    IntegerTensor ids;
    OptionalTensor smooth, weights;
    OptionalIntegerTensor mask;
    std::int64_t quant_mode, counts_type;
    Out rows, numbers, tokens, counts;
    OptionalOut scales_of_rows, counts_of_others, weights_of_rows;
};

// Selects the rows for this rank's experts, ordered by expert, rank and token.
void take(const Tensor& all, const Dispatch& call) {
    Packet packet(all);
    const auto choices = call.ids.size(1);
    const auto tokens = packet.next(call.x.size(1), call.x.scalar_type());
    const auto expert_of = packet.next(choices, at::kLong).flatten();
    const auto weights = packet.next(choices, at::kFloat).flatten();
    const auto first = call.rank * call.on_each();
    const auto own = expert_of.ge(first).logical_and(expert_of.lt(first + call.on_each())).nonzero().squeeze(1);
    const auto copies = own.index({stable_order(expert_of.index({own}))});
    const auto experts = expert_of.index({copies});
    const auto rank_of = copies.div(expert_of.numel() / call.ranks, "trunc");
    const auto counts = at::bincount((experts - first) * call.ranks + rank_of, {}, call.experts);
    const auto of_experts = counts.view({-1, call.ranks}).sum(1);
    call.tokens = call.counts_type == 1 ? of_experts : of_experts.cumsum(0);
    write_first(call.counts, counts.cumsum(0));
    if (call.weights && call.weights_of_rows) write_first(*call.weights_of_rows, weights.index({copies}));
    const auto rows = tokens.index({copies.div(choices, "trunc")});
    if (call.rows.dtype() != at::kChar) return write_first(call.rows, rows);
    const auto wide = widened(rows);
    const auto [quantized, scale] = quantized_rows(call.smooth ? wide * call.smooth->index({experts}) : wide);
    write_first(call.rows, quantized);
    write_first(*call.scales_of_rows, scale);
}

Communication dispatch(const Dispatch& call) {
    require_division(call);
    require_tokens(call.x, call.ids, call);
    const bool quantizes = call.quant_mode == 2;
    TORCH_CHECK(call.quant_mode == 0 || quantizes, "the host NPU has the quantMode 0 and 2 only, not ",
                call.quant_mode);
    TORCH_CHECK(!call.smooth || (quantizes && call.smooth->size(0) == call.experts),
                "scales must be absent if quantMode is 0, and have a row for each of the ", call.experts,
                " experts if it is 2");
    TORCH_CHECK(
        call.rows.dtype() == (quantizes ? at::kChar : call.x.scalar_type()) && (call.scales_of_rows || !quantizes),
        "expandX has dtype ", name_of(call.rows.dtype()), " where quantMode is ", call.quant_mode);
    TORCH_CHECK(call.counts_type == 0 || call.counts_type == 1, "expertTokenNumsType is ", call.counts_type,
                "; CANN takes 0 or 1");
    const auto most = call.most_tokens(call.x.size(0)), missing = most - call.x.size(0);
    const auto rows = most * call.ranks * std::min(call.on_each(), call.ids.size(1));
    TORCH_CHECK(call.rows.sizes()[0] >= rows, "expandX has ", call.rows.sizes()[0], " rows; CANN takes at least ",
                rows);
    const auto send = [call, missing] {
        const auto& ids = call.ids;
        const auto expert_of = expert_of_copies(ids, active_copies(call.mask, ids), call.experts);
        if (!ids.is_meta()) write_first(call.numbers, number_among(expert_of, call.experts));
        const auto numbers = call.weights ? *call.weights : at::zeros(ids.sizes(), ids.options().dtype(at::kFloat));
        return at::cat({at::constant_pad_nd(as_bytes(call.x), {0, 0, 0, missing}),
                        as_bytes(at::constant_pad_nd(expert_of.view(ids.sizes()), {0, 0, 0, missing}, call.experts)),
                        at::constant_pad_nd(as_bytes(numbers), {0, 0, 0, missing})},
                       1);
    };
    const auto receive = [call](const Tensor& all) {
        if (!all.is_meta()) take(all, call);
    };
    return {Function::MoeDistributeDispatch, send, receive};
}

const TensorRule kX{"x", kHalves, "B H"}, kExpertIds{"expertIds", {ACL_INT32}, "B K<=16"};
const TensorRule kScales{"scales", kFloat, "* H"}, kActive{"xActiveMask", {ACL_BOOL}, "B | B K"};
const TensorRule kExpertScales{"expertScales", kFloat, "B K"};
const TensorRule kExpandX{"expandX", as("x") | Dtypes{ACL_INT8}, "* H"}, kRowScales{"dynamicScales", kFloat, "*"};
const TensorRule kExpandIdx{"expandIdx", {ACL_INT32}, "*"}, kTokenNums{"expertTokenNums", {ACL_INT64}, "*"};
const TensorRule kEpCounts{"epRecvCounts", {ACL_INT32}, "*"}, kTpCounts{"tpRecvCounts", {ACL_INT32}, "*"};
const TensorRule kRowWeights{"expandScales", kFloat, "*"};
const std::initializer_list<TensorRule> kDispatched{kX,        kExpertIds, kScales,    kActive,    kExpertScales,
                                                    kExpandX,  kRowScales, kExpandIdx, kTokenNums, kEpCounts,
                                                    kTpCounts, kRowWeights};
constexpr Members<&Dispatch::x, &Dispatch::ids, &Dispatch::smooth, &Dispatch::mask, &Dispatch::weights> kDispatchInputs;
constexpr Members<&Dispatch::group, &Dispatch::ranks, &Dispatch::rank, &Dispatch::experts, &Dispatch::unread_text,
                  &Dispatch::other_ranks, &Dispatch::other_rank, &Dispatch::shard_type, &Dispatch::shared_experts,
                  &Dispatch::ranks_of_shared>
    kDivision;
constexpr auto kDispatchSettings =
    kDivision + Members<&Dispatch::quant_mode, &Dispatch::global_tokens, &Dispatch::counts_type>{};
constexpr Members<&Dispatch::algorithm, &Dispatch::zero_experts, &Dispatch::copy_experts, &Dispatch::constant_experts>
    kSpecialExperts;
constexpr Members<&Dispatch::rows, &Dispatch::scales_of_rows, &Dispatch::numbers, &Dispatch::tokens, &Dispatch::counts,
                  &Dispatch::counts_of_others, &Dispatch::weights_of_rows>
    kDispatchOuts;
const CommunicatingFormula<"aclnnMoeDistributeDispatch",
                           collected<dispatch, kDispatchInputs, kDispatchSettings, kDispatchOuts>>
    dispatch_tokens{kDispatched};
const CommunicatingFormula<"aclnnMoeDistributeDispatchV2",
                           collected<dispatch, kDispatchInputs, kDispatchSettings, &Dispatch::algorithm, kDispatchOuts>>
    dispatch_tokens_v2{kDispatched};
const CommunicatingFormula<"aclnnMoeDistributeDispatchV4",
                           collected<dispatch, kDispatchInputs, &Dispatch::elastic_info, &Dispatch::performance_info,
                                     kDispatchSettings, kSpecialExperts, kDispatchOuts>>
    dispatch_tokens_v4{kDispatched};

// The arguments of all versions of combine.
struct Combine : Division {
    AnyTensor rows;
    IntegerTensor ids, numbers, ends;
    Tensor weights;
    OptionalIntegerTensor mask, ends_of_others;
    OptionalTensor shared, weights_of_rows;
    Without<"activationScale"> activation_scale;
    Without<"weightScale"> weight_scale;
    Without<"groupList"> group_list;
    Without<"oriX"> original;
    Without<"constants of experts"> constants;
    std::int64_t out_dtype, quant_mode, list_type;
    Out sums;
};

// Sums the rows of each token over all ranks. Rows of inactive tokens are unchanged.
Tensor combined(const Tensor& all, const Combine& call) {
    Packet packet(all.view({call.ranks, -1}));
    const auto& [rows, ids] = std::tie(call.rows, call.ids);
    const auto tokens = packet.next(rows.numel(), rows.scalar_type()).view({-1, rows.size(1)});
    const auto ends = packet.next(call.experts, at::kInt).to(at::kLong);
    const auto active = active_copies(call.mask, ids);
    const auto expert_of = expert_of_copies(ids, active, call.experts).clamp_max(call.experts - 1);
    const auto rank_of = expert_of.div(call.on_each(), "trunc");
    const auto group = expert_of.remainder(call.on_each()) * call.ranks + call.rank;
    const auto before = at::constant_pad_nd(ends, {1, -1}).index({rank_of, group});
    const auto place = (before + call.numbers.slice(0, 0, ids.numel())).masked_fill(active.flatten().logical_not(), 0);
    require_indices("the row of a token", place, rows.size(0));
    const auto own = widened(tokens.index({rank_of * rows.size(0) + place})) * call.weights.reshape({-1, 1});
    auto sums = own.masked_fill(active.reshape({-1, 1}).logical_not(), 0).view({ids.size(0), ids.size(1), -1}).sum(1);
    if (call.shared) sums = sums + call.shared->view(sums.sizes());
    return at::where(active.any(1, true), sums, widened(call.sums.in_place()));
}

Communication combine(const Combine& call) {
    require_division(call);
    require_tokens(call.rows, call.ids, call);
    TORCH_CHECK(call.out_dtype == 0 && call.list_type == 0, "outDtype is ", call.out_dtype, " and groupListType ",
                call.list_type, "; CANN takes 0");
    TORCH_CHECK(call.quant_mode == 0, "the host NPU has the commQuantMode 0 only, not ", call.quant_mode);
    TORCH_CHECK(call.ends.numel() >= call.experts && call.numbers.numel() >= call.ids.numel(), "epSendCounts has ",
                call.ends.numel(), " numbers for ", call.experts, " experts, expandIdx ", call.numbers.numel(), " for ",
                call.ids.numel(), " copies");
    TORCH_CHECK(!call.shared || soc() != Soc::Ascend910B, "sharedExpertX must be absent on this chip");
    const auto send = [call] {
        return at::cat({as_bytes(call.rows).flatten(), as_bytes(call.ends.slice(0, 0, call.experts))});
    };
    return {Function::MoeDistributeCombine, send, [call](const Tensor& all) {
                if (!all.is_meta()) call.sums = combined(all, call);
            }};
}

const TensorRule kExpertRows{"expandX", kHalves, "* H"}, kEpSent{"epSendCounts", {ACL_INT32}, "*"};
const TensorRule kTpSent{"tpSendCounts", {ACL_INT32}, "*"}, kShared{"sharedExpertX", as("expandX"), "B H | * * H"};
const TensorRule kSums{"x", as("expandX"), "B H"};
const std::initializer_list<TensorRule> kCombined{kExpertRows, kExpertIds, kExpandIdx,  kEpSent, kExpertScales,
                                                  kTpSent,     kActive,    kRowWeights, kShared, kSums};
constexpr Members<&Combine::rows, &Combine::ids, &Combine::numbers, &Combine::ends, &Combine::weights,
                  &Combine::ends_of_others, &Combine::mask, &Combine::activation_scale, &Combine::weight_scale,
                  &Combine::group_list, &Combine::weights_of_rows>
    kCombineInputs;
constexpr Members<&Combine::elastic_info, &Combine::original, &Combine::constants, &Combine::constants,
                  &Combine::constants, &Combine::performance_info>
    kCombineInfo;
constexpr auto kCombineSettings =
    kDivision + Members<&Combine::global_tokens, &Combine::out_dtype, &Combine::quant_mode, &Combine::list_type>{};
const CommunicatingFormula<"aclnnMoeDistributeCombine",
                           collected<combine, kCombineInputs, kCombineSettings, &Combine::sums>>
    combine_rows{kExpertRows, kExpertIds, kExpandIdx, kEpSent, kExpertScales, kTpSent, kActive, kRowWeights, kSums};
const CommunicatingFormula<
    "aclnnMoeDistributeCombineV2",
    collected<combine, kCombineInputs, &Combine::shared, kCombineSettings, &Combine::algorithm, &Combine::sums>>
    combine_rows_v2{kCombined};
const CommunicatingFormula<"aclnnMoeDistributeCombineV4",
                           collected<combine, kCombineInputs, &Combine::shared, kCombineInfo, kCombineSettings,
                                     kSpecialExperts, &Combine::sums>>
    combine_rows_v4{kCombined};

}  // namespace
}  // namespace host_npu
