// Mixtures of experts that are divided among ranks: the tokens go to the ranks of their experts, and the experts' rows
// come back. A token's copies are numbered as expertIds is, row by row.
//
// Each rank gets the tokens of all and takes those for its experts, because how many there are is known on the device
// only. CANN's documents leave the contents of what dispatch tells combine to the implementation: here it is the number
// of a copy among those of its rank for the same expert, and how many rows of each expert and rank there are.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "ascendcl/device.h"
#include "host_npu_formulas/communicating.h"
#include "host_npu_formulas/experts.h"
#include "host_npu_formulas/quantization.h"

namespace host_npu {
namespace {

using hccl::Function;

// How the experts are divided: each rank has as many, in the order of the ranks.
struct Division {
    const Group& group;
    std::int64_t ranks, rank, experts, other_ranks, other_rank, shard_type, shared_experts, ranks_of_shared;
    std::int64_t global_tokens;

    std::int64_t on_each() const { return experts / ranks; }
    std::int64_t most_tokens(std::int64_t own) const { return global_tokens == 0 ? own : global_tokens / ranks; }
};

void require_division(const Division& all, const std::string& algorithm) {
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

// A token that is not active goes nowhere. Active ones come first where a token is active as a whole.
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

// The expert of each copy; one past the last for copies that go nowhere.
Tensor expert_of_copies(const Tensor& ids, const Tensor& active, std::int64_t experts) {
    const auto wide = ids.to(at::kLong);
    require_indices("expertIds", wide.masked_fill(active.logical_not(), 0), experts);
    return at::where(active, wide, experts).flatten();
}

// How many copies for the same expert come before each.
Tensor number_among(const Tensor& expert_of, std::int64_t experts) {
    const auto seen = at::one_hot(expert_of, experts + 1).cumsum(0);
    return seen.gather(1, expert_of.unsqueeze(1)).squeeze(1) - 1;
}

Tensor as_bytes(const Tensor& x) { return x.contiguous().view(at::kByte); }

// Rows of bytes that are the rows of several tensors, one after the other, and back.
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

// What is told of a call's tensors besides the dtypes; `tokens` has the tokens of a rank.
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

struct Dispatched {
    const Out& rows;
    const OptionalOut& scales;
    const Out &numbers, &tokens, &counts;
    const OptionalOut& weights;
};

// The rows for this rank's experts: those of an expert one after the other, in the order of the ranks and their tokens.
void take(const Tensor& all, const AnyTensor& x, const IntegerTensor& ids, const OptionalTensor& smooth,
          bool has_weights, bool counts_tokens, const Division& division, const Dispatched& out) {
    Packet packet(all);
    const auto choices = ids.size(1);
    const auto tokens = packet.next(x.size(1), x.scalar_type());
    const auto expert_of = packet.next(choices, at::kLong).flatten();
    const auto weights = packet.next(choices, at::kFloat).flatten();
    const auto first = division.rank * division.on_each();
    const auto own = expert_of.ge(first).logical_and(expert_of.lt(first + division.on_each())).nonzero().squeeze(1);
    const auto copies = own.index({stable_order(expert_of.index({own}))});
    const auto experts = expert_of.index({copies});
    const auto rank_of = copies.div(expert_of.numel() / division.ranks, "trunc");
    const auto counts = at::bincount((experts - first) * division.ranks + rank_of, {}, division.experts);
    const auto of_experts = counts.view({-1, division.ranks}).sum(1);
    out.tokens = counts_tokens ? of_experts : of_experts.cumsum(0);
    write_first(out.counts, counts.cumsum(0));
    if (has_weights && out.weights) write_first(*out.weights, weights.index({copies}));
    const auto rows = tokens.index({copies.div(choices, "trunc")});
    if (out.rows.dtype() != at::kChar) return write_first(out.rows, rows);
    const auto wide = widened(rows);
    const auto [quantized, scale] = quantized_rows(smooth ? wide * smooth->index({experts}) : wide);
    write_first(out.rows, quantized);
    write_first(*out.scales, scale);
}

Communication dispatch(const AnyTensor& x, const IntegerTensor& ids, const OptionalTensor& smooth,
                       const OptionalIntegerTensor& mask, const OptionalTensor& weights, const Division& division,
                       std::int64_t quant_mode, std::int64_t counts, const std::string& algorithm,
                       const Dispatched& out) {
    require_division(division, algorithm);
    require_tokens(x, ids, division);
    const bool quantizes = quant_mode == 2;
    TORCH_CHECK(quant_mode == 0 || quantizes, "the host NPU has the quantMode 0 and 2 only, not ", quant_mode);
    TORCH_CHECK(!smooth || (quantizes && smooth->size(0) == division.experts),
                "scales must be absent if quantMode is 0, and have a row for each of the ", division.experts,
                " experts if it is 2");
    TORCH_CHECK(out.rows.dtype() == (quantizes ? at::kChar : x.scalar_type()) && (out.scales || !quantizes),
                "expandX has dtype ", name_of(out.rows.dtype()), " where quantMode is ", quant_mode);
    TORCH_CHECK(counts == 0 || counts == 1, "expertTokenNumsType is ", counts, "; CANN takes 0 or 1");
    const auto most = division.most_tokens(x.size(0)), missing = most - x.size(0);
    const auto rows = most * division.ranks * std::min(division.on_each(), ids.size(1));
    TORCH_CHECK(out.rows.sizes()[0] >= rows, "expandX has ", out.rows.sizes()[0], " rows; CANN takes at least ", rows);
    const auto send = [=, &x, &ids, &mask, &weights] {
        const auto expert_of = expert_of_copies(ids, active_copies(mask, ids), division.experts);
        if (!ids.is_meta()) write_first(out.numbers, number_among(expert_of, division.experts));
        const auto numbers = weights ? *weights : at::zeros(ids.sizes(), ids.options().dtype(at::kFloat));
        return at::cat(
            {at::constant_pad_nd(as_bytes(x), {0, 0, 0, missing}),
             as_bytes(at::constant_pad_nd(expert_of.view(ids.sizes()), {0, 0, 0, missing}, division.experts)),
             at::constant_pad_nd(as_bytes(numbers), {0, 0, 0, missing})},
            1);
    };
    const auto receive = [=, &x, &ids, &smooth, &weights](const Tensor& all) {
        if (!all.is_meta()) take(all, x, ids, smooth, weights.has_value(), counts == 1, division, out);
    };
    return {Function::MoeDistributeDispatch, send, receive};
}

using NoElasticInfo = Without<"elasticInfo">;
using NoPerformanceInfo = Without<"performanceInfo">;

void require_no_special_experts(std::int64_t zero, std::int64_t copy, std::int64_t constant) {
    TORCH_CHECK(zero == 0 && copy == 0 && constant == 0, "the host NPU has no experts that copy or are constant");
}

Communication dispatch_v4(const AnyTensor& x, const IntegerTensor& ids, const OptionalTensor& smooth,
                          const OptionalIntegerTensor& mask, const OptionalTensor& weights, const NoElasticInfo&,
                          const NoPerformanceInfo&, const Group& group, std::int64_t ranks, std::int64_t rank,
                          std::int64_t experts, const std::string&, std::int64_t other_ranks, std::int64_t other_rank,
                          std::int64_t shard_type, std::int64_t shared, std::int64_t ranks_of_shared,
                          std::int64_t quant_mode, std::int64_t global_tokens, std::int64_t counts,
                          const std::string& algorithm, std::int64_t zero, std::int64_t copy, std::int64_t constant,
                          const Out& rows, const OptionalOut& scales, const Out& numbers, const Out& tokens,
                          const Out& ends, const OptionalOut&, const OptionalOut& weights_of_rows) {
    require_no_special_experts(zero, copy, constant);
    const Division division{group,      ranks,      rank,   experts,         other_ranks,
                            other_rank, shard_type, shared, ranks_of_shared, global_tokens};
    return dispatch(x, ids, smooth, mask, weights, division, quant_mode, counts, algorithm,
                    {rows, scales, numbers, tokens, ends, weights_of_rows});
}

Communication dispatch_v2(const AnyTensor& x, const IntegerTensor& ids, const OptionalTensor& smooth,
                          const OptionalIntegerTensor& mask, const OptionalTensor& weights, const Group& group,
                          std::int64_t ranks, std::int64_t rank, std::int64_t experts, const std::string& other_group,
                          std::int64_t other_ranks, std::int64_t other_rank, std::int64_t shard_type,
                          std::int64_t shared, std::int64_t ranks_of_shared, std::int64_t quant_mode,
                          std::int64_t global_tokens, std::int64_t counts, const std::string& algorithm,
                          const Out& rows, const OptionalOut& scales, const Out& numbers, const Out& tokens,
                          const Out& ends, const OptionalOut& ends_of_others, const OptionalOut& weights_of_rows) {
    return dispatch_v4(x, ids, smooth, mask, weights, {}, {}, group, ranks, rank, experts, other_group, other_ranks,
                       other_rank, shard_type, shared, ranks_of_shared, quant_mode, global_tokens, counts, algorithm, 0,
                       0, 0, rows, scales, numbers, tokens, ends, ends_of_others, weights_of_rows);
}

Communication dispatch_v1(const AnyTensor& x, const IntegerTensor& ids, const OptionalTensor& smooth,
                          const OptionalIntegerTensor& mask, const OptionalTensor& weights, const Group& group,
                          std::int64_t ranks, std::int64_t rank, std::int64_t experts, const std::string& other_group,
                          std::int64_t other_ranks, std::int64_t other_rank, std::int64_t shard_type,
                          std::int64_t shared, std::int64_t ranks_of_shared, std::int64_t quant_mode,
                          std::int64_t global_tokens, std::int64_t counts, const Out& rows, const OptionalOut& scales,
                          const Out& numbers, const Out& tokens, const Out& ends, const OptionalOut& ends_of_others,
                          const OptionalOut& weights_of_rows) {
    return dispatch_v2(x, ids, smooth, mask, weights, group, ranks, rank, experts, other_group, other_ranks, other_rank,
                       shard_type, shared, ranks_of_shared, quant_mode, global_tokens, counts, "", rows, scales,
                       numbers, tokens, ends, ends_of_others, weights_of_rows);
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
const CommunicatingFormula<"aclnnMoeDistributeDispatch", dispatch_v1> dispatch_tokens{kDispatched};
const CommunicatingFormula<"aclnnMoeDistributeDispatchV2", dispatch_v2> dispatch_tokens_v2{kDispatched};
const CommunicatingFormula<"aclnnMoeDistributeDispatchV4", dispatch_v4> dispatch_tokens_v4{kDispatched};

// The sums of each token's rows of all ranks; those of tokens that are not active stay as they are.
Tensor combined(const Tensor& all, const AnyTensor& rows, const IntegerTensor& ids, const IntegerTensor& numbers,
                const Tensor& weights, const OptionalIntegerTensor& mask, const OptionalTensor& shared,
                const Division& division, const Out& out) {
    Packet packet(all.view({division.ranks, -1}));
    const auto tokens = packet.next(rows.numel(), rows.scalar_type()).view({-1, rows.size(1)});
    const auto ends = packet.next(division.experts, at::kInt).to(at::kLong);
    const auto active = active_copies(mask, ids);
    const auto expert_of = expert_of_copies(ids, active, division.experts).clamp_max(division.experts - 1);
    const auto rank_of = expert_of.div(division.on_each(), "trunc");
    const auto group = expert_of.remainder(division.on_each()) * division.ranks + division.rank;
    const auto before = at::constant_pad_nd(ends, {1, -1}).index({rank_of, group});
    const auto place = (before + numbers.slice(0, 0, ids.numel())).masked_fill(active.flatten().logical_not(), 0);
    require_indices("the row of a token", place, rows.size(0));
    const auto own = widened(tokens.index({rank_of * rows.size(0) + place})) * weights.reshape({-1, 1});
    auto sums = own.masked_fill(active.reshape({-1, 1}).logical_not(), 0).view({ids.size(0), ids.size(1), -1}).sum(1);
    if (shared) sums = sums + shared->view(sums.sizes());
    return at::where(active.any(1, true), sums, widened(out.in_place()));
}

Communication combine(const AnyTensor& rows, const IntegerTensor& ids, const IntegerTensor& numbers,
                      const IntegerTensor& ends, const Tensor& weights, const OptionalIntegerTensor& mask,
                      const OptionalTensor& shared, const Division& division, std::int64_t out_dtype,
                      std::int64_t quant_mode, std::int64_t list_type, const std::string& algorithm, const Out& out) {
    require_division(division, algorithm);
    require_tokens(rows, ids, division);
    TORCH_CHECK(out_dtype == 0 && list_type == 0, "outDtype is ", out_dtype, " and groupListType ", list_type,
                "; CANN takes 0");
    TORCH_CHECK(quant_mode == 0, "the host NPU has the commQuantMode 0 only, not ", quant_mode);
    TORCH_CHECK(ends.numel() >= division.experts && numbers.numel() >= ids.numel(), "epSendCounts has ", ends.numel(),
                " numbers for ", division.experts, " experts, expandIdx ", numbers.numel(), " for ", ids.numel(),
                " copies");
    TORCH_CHECK(!shared || soc() != Soc::Ascend910B, "sharedExpertX must be absent on this chip");
    const auto send = [=, &rows, &ends] {
        return at::cat({as_bytes(rows).flatten(), as_bytes(ends.slice(0, 0, division.experts))});
    };
    return {Function::MoeDistributeCombine, send,
            [=, &rows, &ids, &numbers, &weights, &mask, &shared, &out](const Tensor& all) {
                if (all.is_meta()) return;
                out = combined(all, rows, ids, numbers, weights, mask, shared, division, out);
            }};
}

using NoActivationScale = Without<"activationScale">;
using NoWeightScale = Without<"weightScale">;
using NoGroupList = Without<"groupList">;
using NoOriginal = Without<"oriX">;
using NoConstants = Without<"constants of experts">;

Communication combine_v4(const AnyTensor& rows, const IntegerTensor& ids, const IntegerTensor& numbers,
                         const IntegerTensor& ends, const Tensor& weights, const OptionalIntegerTensor&,
                         const OptionalIntegerTensor& mask, const NoActivationScale&, const NoWeightScale&,
                         const NoGroupList&, const OptionalTensor&, const OptionalTensor& shared, const NoElasticInfo&,
                         const NoOriginal&, const NoConstants&, const NoConstants&, const NoConstants&,
                         const NoPerformanceInfo&, const Group& group, std::int64_t ranks, std::int64_t rank,
                         std::int64_t experts, const std::string&, std::int64_t other_ranks, std::int64_t other_rank,
                         std::int64_t shard_type, std::int64_t shared_experts, std::int64_t ranks_of_shared,
                         std::int64_t global_tokens, std::int64_t out_dtype, std::int64_t quant_mode,
                         std::int64_t list_type, const std::string& algorithm, std::int64_t zero, std::int64_t copy,
                         std::int64_t constant, const Out& out) {
    require_no_special_experts(zero, copy, constant);
    const Division division{group,      ranks,      rank,           experts,         other_ranks,
                            other_rank, shard_type, shared_experts, ranks_of_shared, global_tokens};
    return combine(rows, ids, numbers, ends, weights, mask, shared, division, out_dtype, quant_mode, list_type,
                   algorithm, out);
}

Communication combine_v2(const AnyTensor& rows, const IntegerTensor& ids, const IntegerTensor& numbers,
                         const IntegerTensor& ends, const Tensor& weights, const OptionalIntegerTensor& ends_of_others,
                         const OptionalIntegerTensor& mask, const NoActivationScale&, const NoWeightScale&,
                         const NoGroupList&, const OptionalTensor& weights_of_rows, const OptionalTensor& shared,
                         const Group& group, std::int64_t ranks, std::int64_t rank, std::int64_t experts,
                         const std::string& other_group, std::int64_t other_ranks, std::int64_t other_rank,
                         std::int64_t shard_type, std::int64_t shared_experts, std::int64_t ranks_of_shared,
                         std::int64_t global_tokens, std::int64_t out_dtype, std::int64_t quant_mode,
                         std::int64_t list_type, const std::string& algorithm, const Out& out) {
    return combine_v4(rows, ids, numbers, ends, weights, ends_of_others, mask, {}, {}, {}, weights_of_rows, shared, {},
                      {}, {}, {}, {}, {}, group, ranks, rank, experts, other_group, other_ranks, other_rank, shard_type,
                      shared_experts, ranks_of_shared, global_tokens, out_dtype, quant_mode, list_type, algorithm, 0, 0,
                      0, out);
}

Communication combine_v1(const AnyTensor& rows, const IntegerTensor& ids, const IntegerTensor& numbers,
                         const IntegerTensor& ends, const Tensor& weights, const OptionalIntegerTensor& ends_of_others,
                         const OptionalIntegerTensor& mask, const NoActivationScale&, const NoWeightScale&,
                         const NoGroupList&, const OptionalTensor& weights_of_rows, const Group& group,
                         std::int64_t ranks, std::int64_t rank, std::int64_t experts, const std::string& other_group,
                         std::int64_t other_ranks, std::int64_t other_rank, std::int64_t shard_type,
                         std::int64_t shared_experts, std::int64_t ranks_of_shared, std::int64_t global_tokens,
                         std::int64_t out_dtype, std::int64_t quant_mode, std::int64_t list_type, const Out& out) {
    static const OptionalTensor without;
    return combine_v2(rows, ids, numbers, ends, weights, ends_of_others, mask, {}, {}, {}, weights_of_rows, without,
                      group, ranks, rank, experts, other_group, other_ranks, other_rank, shard_type, shared_experts,
                      ranks_of_shared, global_tokens, out_dtype, quant_mode, list_type, "", out);
}

const TensorRule kExpertRows{"expandX", kHalves, "* H"}, kEpSent{"epSendCounts", {ACL_INT32}, "*"};
const TensorRule kTpSent{"tpSendCounts", {ACL_INT32}, "*"}, kShared{"sharedExpertX", as("expandX"), "B H | * * H"};
const TensorRule kSums{"x", as("expandX"), "B H"};
const CommunicatingFormula<"aclnnMoeDistributeCombine", combine_v1> combine_rows{
    kExpertRows, kExpertIds, kExpandIdx, kEpSent, kExpertScales, kTpSent, kActive, kRowWeights, kSums};
const std::initializer_list<TensorRule> kCombined{kExpertRows, kExpertIds, kExpandIdx,  kEpSent, kExpertScales,
                                                  kTpSent,     kActive,    kRowWeights, kShared, kSums};
const CommunicatingFormula<"aclnnMoeDistributeCombineV2", combine_v2> combine_rows_v2{kCombined};
const CommunicatingFormula<"aclnnMoeDistributeCombineV4", combine_v4> combine_rows_v4{kCombined};

}  // namespace
}  // namespace host_npu
