// Products of matrices with a collective before or behind them.
#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>

#include "host_npu_formulas/communicating.h"

namespace host_npu {
namespace {

using hccl::Function;

constexpr auto kSum = "sum";

void require_split(std::int64_t comm_turn, std::int64_t stream_mode) {
    TORCH_CHECK(comm_turn == 0, "commTurn is ", comm_turn, "; it can be 0 only");
    TORCH_CHECK(stream_mode == 1, "streamMode is ", stream_mode, "; it can be 1 only");
}

void require_sum(const std::string& reduce_op) {
    TORCH_CHECK(reduce_op == kSum, "reduceOp is \"", reduce_op, "\"; it can be \"sum\" only");
}

// All of them give the same numbers.
void require_mode(const std::string& comm_mode) {
    TORCH_CHECK(
        comm_mode.empty() || comm_mode == "aicpu" || comm_mode == "ai_cpu" || comm_mode == "aiv" || comm_mode == "ccu",
        "commMode is \"", comm_mode, "\"; it can be \"aicpu\", \"ai_cpu\", \"aiv\" or \"ccu\"");
}

void require_zero(std::int64_t value, const char* name) {
    TORCH_CHECK(value == 0, name, " is ", value, "; without quantization it can be 0 only");
}

void require_inner(const Tensor& x1) {
    const auto k = x1.size(1);
    TORCH_CHECK(k >= 256 && k < 65535, "x1 has ", k, " columns; it can have 256 to 65534");
}

// Returns x1 @ x2 + bias in float32.
Tensor biased_product(const Tensor& x1, const Tensor& x2, const OptionalAnyTensor& bias) {
    const auto y = at::matmul(widened(x1), widened(x2));
    return bias ? y + widened(*bias) : y;
}

Communication matmul_all_reduce_v3(const AnyTensor& x1, const AnyTensor& x2, const OptionalAnyTensor& bias,
                                   const OptionalAnyTensor& x3, const Group&, const std::string& reduce_op,
                                   const std::string& comm_mode, std::int64_t comm_turn, std::int64_t stream_mode,
                                   const Out& output) {
    require_sum(reduce_op);
    require_mode(comm_mode);
    require_split(comm_turn, stream_mode);
    const auto send = [&] {
        const auto y = biased_product(x1, x2, bias);
        return (x3 ? y + widened(*x3) : y).to(output.dtype());
    };
    return {Function::MatmulAllReduce, send, [&](const Tensor& sum) { output = sum; }};
}
const TensorRule kLeft{"x1", kHalves, "...m k"}, kRight{"x2", as("x1"), "k n"}, kBias{"bias", as("x1"), "n"};
const TensorRule kSummand{"x3", as("x1"), "...m n"}, kProduct{"output", as("x1"), "...m n"};
const CommunicatingFormula<"aclnnMatmulAllReduceV3", matmul_all_reduce_v3> all_reduce_with_mode{kLeft, kRight, kBias,
                                                                                                kSummand, kProduct};

Communication matmul_all_reduce_v2(const AnyTensor& x1, const AnyTensor& x2, const OptionalAnyTensor& bias,
                                   const OptionalAnyTensor& x3, const Group& group, const std::string& reduce_op,
                                   std::int64_t comm_turn, std::int64_t stream_mode, const Out& output) {
    static const std::string any_mode;
    return matmul_all_reduce_v3(x1, x2, bias, x3, group, reduce_op, any_mode, comm_turn, stream_mode, output);
}
const CommunicatingFormula<"aclnnMatmulAllReduceV2", matmul_all_reduce_v2> all_reduce_with_summand{kLeft, kRight, kBias,
                                                                                                   kSummand, kProduct};

Communication matmul_all_reduce(const AnyTensor& x1, const AnyTensor& x2, const OptionalAnyTensor& bias,
                                const Group& group, const std::string& reduce_op, std::int64_t comm_turn,
                                std::int64_t stream_mode, const Out& output) {
    static const OptionalAnyTensor without;
    return matmul_all_reduce_v2(x1, x2, bias, without, group, reduce_op, comm_turn, stream_mode, output);
}
const CommunicatingFormula<"aclnnMatmulAllReduce", matmul_all_reduce> all_reduce{kLeft, kRight, kBias, kProduct};

// The rows of a rank, and those of all ranks.
void require_rows_of_all(const char* name, std::int64_t rows, std::int64_t expected, std::int64_t of_x1,
                         const Group& group) {
    TORCH_CHECK(rows == expected, name, " has ", rows, " rows instead of ", expected, ": x1 has ", of_x1,
                " and the communicator \"", group.name, "\" ", group.ranks, " ranks");
}

Communication all_gather_matmul(const AnyTensor& x1, const AnyTensor& x2, const OptionalAnyTensor& bias,
                                const Group& group, std::int64_t gather_index, std::int64_t comm_turn,
                                std::int64_t stream_mode, const Out& output, const OptionalOut& gathered) {
    TORCH_CHECK(gather_index == 0, "gatherIndex is ", gather_index, "; it can be 0 only");
    require_split(comm_turn, stream_mode);
    require_inner(x1);
    const auto all_rows = x1.size(0) * group.ranks;
    require_rows_of_all("output", output.sizes()[0], all_rows, x1.size(0), group);
    // An empty one asks for none.
    const bool gathers = gathered && gathered->sizes().size() == 2;
    if (gathers) require_rows_of_all("gatherOut", gathered->sizes()[0], all_rows, x1.size(0), group);
    return {Function::AllGatherMatmul, [&]() -> Tensor { return x1; },
            [&, gathers](const Tensor& all) {
                output = biased_product(all, x2, bias);
                if (gathers) *gathered = all;
            }};
}
const TensorRule kRowsOfRank{"x1", kHalves, "m k"}, kGathered{"gatherOut", as("x1"), "* k | 0"};
const TensorRule kOtherRows{"output", as("x1"), "* n"};
const CommunicatingFormula<"aclnnAllGatherMatmul", all_gather_matmul> all_gather{kRowsOfRank, kRight, kBias, kOtherRows,
                                                                                 kGathered};

using NoX1Scale = Without<"x1Scale">;
using NoX2Scale = Without<"x2Scale">;
using NoQuantScale = Without<"quantScale">;
using NoMaximum = Without<"amaxOut">;

Communication all_gather_matmul_v2(const AnyTensor& x1, const AnyTensor& x2, const OptionalAnyTensor& bias, NoX1Scale,
                                   NoX2Scale, NoQuantScale, std::int64_t block_size, const Group& group,
                                   std::int64_t gather_index, std::int64_t comm_turn, std::int64_t stream_mode,
                                   std::int64_t group_size, const std::string& comm_mode, const Out& output,
                                   const OptionalOut& gathered, NoMaximum) {
    require_zero(block_size, "blockSize");
    require_zero(group_size, "groupSize");
    require_mode(comm_mode);
    return all_gather_matmul(x1, x2, bias, group, gather_index, comm_turn, stream_mode, output, gathered);
}
const CommunicatingFormula<"aclnnAllGatherMatmulV2", all_gather_matmul_v2> all_gather_with_mode{
    kRowsOfRank, kRight, kBias, kOtherRows, kGathered};

Communication matmul_reduce_scatter(const AnyTensor& x1, const AnyTensor& x2, const OptionalAnyTensor& bias,
                                    const Group& group, const std::string& reduce_op, std::int64_t comm_turn,
                                    std::int64_t stream_mode, const Out& output) {
    require_sum(reduce_op);
    require_split(comm_turn, stream_mode);
    require_inner(x1);
    const auto rows = x1.size(0);
    TORCH_CHECK(rows % group.ranks == 0, "x1 has ", rows, " rows, which cannot be divided among the ", group.ranks,
                " ranks of the communicator \"", group.name, "\"");
    require_rows_of_all("output", output.sizes()[0], rows / group.ranks, rows, group);
    return {Function::MatmulReduceScatter, [&] { return biased_product(x1, x2, bias).to(output.dtype()); },
            [&](const Tensor& part) { output = part; }};
}
const CommunicatingFormula<"aclnnMatmulReduceScatter", matmul_reduce_scatter> reduce_scatter{kRowsOfRank, kRight, kBias,
                                                                                             kOtherRows};

Communication matmul_reduce_scatter_v2(const AnyTensor& x1, const AnyTensor& x2, const OptionalAnyTensor& bias,
                                       NoX1Scale, NoX2Scale, NoQuantScale, std::int64_t block_size, const Group& group,
                                       const std::string& reduce_op, std::int64_t comm_turn, std::int64_t stream_mode,
                                       std::int64_t group_size, const std::string& comm_mode, const Out& output,
                                       NoMaximum) {
    require_zero(block_size, "blockSize");
    require_zero(group_size, "groupSize");
    require_mode(comm_mode);
    return matmul_reduce_scatter(x1, x2, bias, group, reduce_op, comm_turn, stream_mode, output);
}
const CommunicatingFormula<"aclnnMatmulReduceScatterV2", matmul_reduce_scatter_v2> reduce_scatter_with_mode{
    kRowsOfRank, kRight, kBias, kOtherRows};

}  // namespace
}  // namespace host_npu
