// Matrix products with a collective before or after them.
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

// All modes compute the same result.
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

// The arguments of all versions.
struct Product {
    AnyTensor x1, x2;
    OptionalAnyTensor bias, x3;
    Without<"x1Scale"> x1_scale;
    Without<"x2Scale"> x2_scale;
    Without<"quantScale"> quant_scale;
    Group group;
    std::string reduce_op, comm_mode;
    std::int64_t gather_index, comm_turn, stream_mode, block_size, group_size;
    Out output;
    OptionalOut gathered;
    Without<"amaxOut"> maximum;
};

// Checks the settings that a version has.
void require_settings(const Product& call) {
    require_mode(call.comm_mode);
    require_split(call.comm_turn, call.stream_mode);
    require_zero(call.block_size, "blockSize");
    require_zero(call.group_size, "groupSize");
}

Communication matmul_all_reduce(const Product& call) {
    require_sum(call.reduce_op);
    require_settings(call);
    const auto send = [call] {
        const auto y = biased_product(call.x1, call.x2, call.bias);
        return (call.x3 ? y + widened(*call.x3) : y).to(call.output.dtype());
    };
    return {Function::MatmulAllReduce, send, [call](const Tensor& sum) { call.output = sum; }};
}
constexpr Members<&Product::x1, &Product::x2, &Product::bias> kFactors;
constexpr Members<&Product::x1_scale, &Product::x2_scale, &Product::quant_scale, &Product::block_size> kNoQuantization;
constexpr Members<&Product::comm_turn, &Product::stream_mode> kSplit;
constexpr Members<&Product::group_size, &Product::comm_mode> kCommMode;
const TensorRule kLeft{"x1", kHalves, "...m k"}, kRight{"x2", as("x1"), "k n"}, kBias{"bias", as("x1"), "n"};
const TensorRule kSummand{"x3", as("x1"), "...m n"}, kProduct{"output", as("x1"), "...m n"};
const CommunicatingFormula<"aclnnMatmulAllReduce", collected<matmul_all_reduce, kFactors, &Product::group,
                                                             &Product::reduce_op, kSplit, &Product::output>>
    all_reduce{kLeft, kRight, kBias, kProduct};
const CommunicatingFormula<"aclnnMatmulAllReduceV2",
                           collected<matmul_all_reduce, kFactors, &Product::x3, &Product::group, &Product::reduce_op,
                                     kSplit, &Product::output>>
    all_reduce_with_summand{kLeft, kRight, kBias, kSummand, kProduct};
const CommunicatingFormula<"aclnnMatmulAllReduceV3",
                           collected<matmul_all_reduce, kFactors, &Product::x3, &Product::group, &Product::reduce_op,
                                     &Product::comm_mode, kSplit, &Product::output>>
    all_reduce_with_mode{kLeft, kRight, kBias, kSummand, kProduct};

// Checks the number of rows in a tensor of one or all ranks.
void require_rows_of_all(const char* name, std::int64_t rows, std::int64_t expected, std::int64_t of_x1,
                         const Group& group) {
    TORCH_CHECK(rows == expected, name, " has ", rows, " rows instead of ", expected, ": x1 has ", of_x1,
                " and the communicator \"", group.name, "\" ", group.ranks, " ranks");
}

Communication all_gather_matmul(const Product& call) {
    TORCH_CHECK(call.gather_index == 0, "gatherIndex is ", call.gather_index, "; it can be 0 only");
    require_settings(call);
    require_inner(call.x1);
    const auto rows = call.x1.size(0), all_rows = rows * call.group.ranks;
    require_rows_of_all("output", call.output.sizes()[0], all_rows, rows, call.group);
    // An empty gatherOut requests no gathered rows.
    const bool gathers = call.gathered && call.gathered->sizes().size() == 2;
    if (gathers) require_rows_of_all("gatherOut", call.gathered->sizes()[0], all_rows, rows, call.group);
    return {Function::AllGatherMatmul, [call]() -> Tensor { return call.x1; },
            [call, gathers](const Tensor& all) {
                call.output = biased_product(all, call.x2, call.bias);
                if (gathers) *call.gathered = all;
            }};
}
const TensorRule kRowsOfRank{"x1", kHalves, "m k"}, kGathered{"gatherOut", as("x1"), "* k | 0"};
const TensorRule kOtherRows{"output", as("x1"), "* n"};
const CommunicatingFormula<"aclnnAllGatherMatmul",
                           collected<all_gather_matmul, kFactors, &Product::group, &Product::gather_index, kSplit,
                                     &Product::output, &Product::gathered>>
    all_gather{kRowsOfRank, kRight, kBias, kOtherRows, kGathered};
const CommunicatingFormula<
    "aclnnAllGatherMatmulV2",
    collected<all_gather_matmul, kFactors, kNoQuantization, &Product::group, &Product::gather_index, kSplit, kCommMode,
              &Product::output, &Product::gathered, &Product::maximum>>
    all_gather_with_mode{kRowsOfRank, kRight, kBias, kOtherRows, kGathered};

Communication matmul_reduce_scatter(const Product& call) {
    require_sum(call.reduce_op);
    require_settings(call);
    require_inner(call.x1);
    const auto rows = call.x1.size(0), ranks = call.group.ranks;
    TORCH_CHECK(rows % ranks == 0, "x1 has ", rows, " rows, which cannot be divided among the ", ranks,
                " ranks of the communicator \"", call.group.name, "\"");
    require_rows_of_all("output", call.output.sizes()[0], rows / ranks, rows, call.group);
    return {Function::MatmulReduceScatter,
            [call] { return biased_product(call.x1, call.x2, call.bias).to(call.output.dtype()); },
            [call](const Tensor& part) { call.output = part; }};
}
const CommunicatingFormula<"aclnnMatmulReduceScatter", collected<matmul_reduce_scatter, kFactors, &Product::group,
                                                                 &Product::reduce_op, kSplit, &Product::output>>
    reduce_scatter{kRowsOfRank, kRight, kBias, kOtherRows};
const CommunicatingFormula<"aclnnMatmulReduceScatterV2",
                           collected<matmul_reduce_scatter, kFactors, kNoQuantization, &Product::group,
                                     &Product::reduce_op, kSplit, kCommMode, &Product::output, &Product::maximum>>
    reduce_scatter_with_mode{kRowsOfRank, kRight, kBias, kOtherRows};

}  // namespace
}  // namespace host_npu
