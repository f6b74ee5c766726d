// Products of tokens with experts that are distributed over ranks, after or before an all-to-all of the tokens.
//
// The counts of a rank list, rank by rank, the tokens for each expert of that rank (sent) or from that rank for each of
// its own experts (received). Tokens are exchanged in this order, and grouped by expert for the products.
#include <numeric>

#include "ascendcl/device.h"
#include "host_npu_formulas/communicating.h"

namespace host_npu {
namespace {

using hccl::Function;
using Counts = std::vector<std::int64_t>;

struct ExpertProduct {
    AnyTensor x, weight;
    Without<"sendCountsTensor"> sent_tensor;
    Without<"recvCountsTensor"> received_tensor;
    OptionalAnyTensor shared_x, shared_weight;
    Group group;
    std::int64_t ranks;
    Counts sent, received;
    bool is_transposed, shared_is_transposed, returns_tokens;
    Out y;
    OptionalOut shared_y, tokens;

    std::int64_t experts() const { return weight.size(0); }
};

// Returns the sum of each of `parts` equal parts.
Counts sums(const Counts& counts, std::int64_t parts) {
    Counts found;
    const auto size = static_cast<std::ptrdiff_t>(counts.size()) / parts;
    for (auto first = counts.begin(); first != counts.end(); first += size) {
        found.push_back(std::accumulate(first, first + size, std::int64_t{0}));
    }
    return found;
}

// Transposes a matrix of blocks with `rows` rows, stored row by row.
template <class Block>
std::vector<Block> transposed(const std::vector<Block>& blocks, std::int64_t rows) {
    const auto columns = blocks.size() / static_cast<std::size_t>(rows);
    std::vector<Block> found;
    for (std::size_t column = 0; column < columns; ++column) {
        for (auto index = column; index < blocks.size(); index += columns) found.push_back(blocks[index]);
    }
    return found;
}

void require_counts(const char* name, const Counts& counts, const ExpertProduct& call, std::int64_t rows) {
    const auto expected = call.experts() * call.ranks;
    TORCH_CHECK(static_cast<std::int64_t>(counts.size()) == expected, name, " has ", counts.size(),
                " numbers instead of ", expected, ": there are ", call.experts(), " experts on each of ", call.ranks,
                " ranks");
    const bool none_is_negative = std::ranges::all_of(counts, [](auto count) { return count >= 0; });
    const auto sum = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    TORCH_CHECK(none_is_negative && sum == rows, name, " counts ", sum, " tokens instead of ", rows);
}

void require_call(const ExpertProduct& call, std::int64_t sent, std::int64_t received) {
    const bool is_950 = soc() == Soc::Ascend950;
    TORCH_CHECK(is_950 || soc() == Soc::Ascend910_93, "CANN does not have this operator on this chip");
    TORCH_CHECK(call.ranks == call.group.ranks, "epWorldSize is ", call.ranks, ", and the communicator \"",
                call.group.name, "\" has ", call.group.ranks, " ranks");
    const Counts taken = is_950 ? Counts{2, 4, 8, 16, 32, 64} : Counts{8, 16, 32, 64, 128};
    TORCH_CHECK(std::ranges::find(taken, call.ranks) != taken.end(), "epWorldSize is ", call.ranks, "; CANN takes ",
                taken, " on this chip");
    TORCH_CHECK(call.experts() > 0, "gmmWeight has no experts");
    require_counts("sendCounts", call.sent, call, sent);
    require_counts("recvCounts", call.received, call, received);
    TORCH_CHECK(call.shared_x.has_value() == call.shared_weight.has_value(), "mmX and mmWeight must be given together");
}

Tensor grouped_by_experts(const Tensor& rows, const Counts& counts, std::int64_t ranks) {
    return at::cat(transposed(rows.split_with_sizes(counts), ranks));
}

Tensor grouped_by_ranks(const Tensor& rows, const Counts& counts, std::int64_t ranks) {
    const auto of_experts = transposed(counts, ranks);
    return at::cat(transposed(rows.split_with_sizes(of_experts), static_cast<std::int64_t>(counts.size()) / ranks));
}

Tensor times_matrix(const Tensor& rows, const Tensor& matrix, bool is_transposed) {
    const auto wide = widened(matrix);
    return at::matmul(widened(rows), is_transposed ? wide.t() : wide);
}

// The product of each expert's tokens with its matrix.
Tensor expert_products(const Tensor& tokens, const Counts& counts, const ExpertProduct& call) {
    const auto parts = tokens.split_with_sizes(sums(transposed(counts, call.ranks), call.experts()));
    std::vector<Tensor> all;
    for (const auto& part : parts) {
        const auto& matrix = call.weight[static_cast<std::int64_t>(all.size())];
        all.push_back(times_matrix(part, matrix, call.is_transposed));
    }
    return at::cat(all);
}

void multiply_shared(const ExpertProduct& call) {
    if (!call.shared_x) return;
    TORCH_CHECK(call.shared_y, "mmY is null");
    *call.shared_y = times_matrix(*call.shared_x, *call.shared_weight, call.shared_is_transposed);
}

Communication alltoallv_matmul(const ExpertProduct& call) {
    require_call(call, call.x.size(0), call.y.sizes()[0]);
    TORCH_CHECK(!call.returns_tokens || call.tokens, "permuteOut is null");
    const auto receive = [call](const Tensor& received) {
        const auto tokens = grouped_by_experts(received, call.received, call.ranks);
        call.y = expert_products(tokens, call.received, call);
        if (call.returns_tokens) *call.tokens = tokens;
        multiply_shared(call);
    };
    return {Function::AlltoAllvGroupedMatMul, [call]() -> Tensor { return call.x; }, receive,
            sums(call.sent, call.ranks), sums(call.received, call.ranks)};
}

Communication matmul_alltoallv(const ExpertProduct& call) {
    require_call(call, call.x.size(0), call.y.sizes()[0]);
    const auto send = [call] {
        return grouped_by_ranks(expert_products(call.x, call.sent, call), call.sent, call.ranks).to(call.y.dtype());
    };
    const auto receive = [call](const Tensor& received) {
        call.y = received;
        multiply_shared(call);
    };
    return {Function::GroupedMatMulAlltoAllv, send, receive, sums(call.sent, call.ranks),
            sums(call.received, call.ranks)};
}

constexpr Members<&ExpertProduct::x, &ExpertProduct::weight, &ExpertProduct::sent_tensor,
                  &ExpertProduct::received_tensor, &ExpertProduct::shared_x, &ExpertProduct::shared_weight,
                  &ExpertProduct::group, &ExpertProduct::ranks, &ExpertProduct::sent, &ExpertProduct::received,
                  &ExpertProduct::is_transposed, &ExpertProduct::shared_is_transposed>
    kExpertProduct;
const CommunicatingFormula<"aclnnAlltoAllvGroupedMatMul",
                           collected<alltoallv_matmul, kExpertProduct, &ExpertProduct::returns_tokens,
                                     &ExpertProduct::y, &ExpertProduct::shared_y, &ExpertProduct::tokens>>
    tokens_to_experts{{"gmmX", kHalves, "* *"},
                      {"gmmWeight", as("gmmX"), "* * *"},
                      {"mmXOptional", as("gmmX"), "B *"},
                      {"mmWeightOptional", as("gmmX"), "* *"},
                      {"gmmY", as("gmmX"), "* *"},
                      {"mmYOptional", as("gmmX"), "B * | 0"},
                      {"permuteOutOptional", as("gmmX"), "* * | 0"}};
const CommunicatingFormula<"aclnnGroupedMatMulAlltoAllv",
                           collected<matmul_alltoallv, kExpertProduct, &ExpertProduct::y, &ExpertProduct::shared_y>>
    tokens_from_experts{{"gmmX", kHalves, "* *"},           {"gmmWeight", as("gmmX"), "* * *"},
                        {"mmXOptional", as("gmmX"), "B *"}, {"mmWeightOptional", as("gmmX"), "* *"},
                        {"y", as("gmmX"), "* *"},           {"mmYOptional", as("gmmX"), "B * | 0"}};

}  // namespace
}  // namespace host_npu
