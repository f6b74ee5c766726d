// Products of groups of rows with a matrix each.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <numeric>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

using TensorList = std::vector<Tensor>;
using Sizes = std::vector<std::int64_t>;

TensorList without_batches(const TensorList& matrices) {
    return matrices.size() == 1 && matrices[0].dim() == 3 ? matrices[0].unbind() : matrices;
}

void assign(const TensorList& results, const std::vector<Out>& outs) {
    if (outs.size() == 1 && results.size() != 1) {
        outs[0] = at::cat(results);
        return;
    }
    TORCH_CHECK(outs.size() == results.size(), results.size(), " products have ", outs.size(), " outputs");
    for (std::size_t index = 0; index < results.size(); ++index) outs[index] = results[index];
}

// Of sums of sizes.
Sizes differences(Sizes ends) {
    std::adjacent_difference(ends.begin(), ends.end(), ends.begin());
    for (const auto size : ends) TORCH_CHECK(size >= 0, "the ends of the groups are not in order");
    return ends;
}

// The rows of x, of which each group has so many; or the tensors of x, if there are no groups.
void products(const TensorList& x, const TensorList& weight, const TensorList& bias, const Sizes& rows,
              const std::vector<Out>& outs) {
    auto parts = x;
    if (!rows.empty()) {
        const auto all = x.size() == 1 ? x[0] : at::cat(x);
        const auto total = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
        TORCH_CHECK(total == all.size(0), "the groups have ", total, " of ", all.size(0), " rows");
        parts = all.split_with_sizes(rows);
    }
    const auto matrices = without_batches(weight);
    const auto added = bias.size() == 1 && bias[0].dim() == 2 ? bias[0].unbind() : bias;
    TORCH_CHECK(parts.size() == matrices.size(), parts.size(), " groups have ", matrices.size(), " matrices");
    TORCH_CHECK(added.empty() || added.size() == matrices.size(), added.size(), " biases for ", matrices.size());
    TensorList results;
    for (std::size_t index = 0; index < parts.size(); ++index) {
        const auto product = parts[index].matmul(matrices[index]);
        results.push_back(added.empty() ? product : product + added[index]);
    }
    assign(results, outs);
}

void grouped(const TensorList& x, const TensorList& weight, const TensorList& bias, const TensorList& scale,
             const TensorList& offset, const TensorList& antiquant_scale, const TensorList& antiquant_offset,
             const Sizes& ends, std::int64_t, const std::vector<Out>& outs) {
    TORCH_CHECK(scale.empty() && offset.empty() && antiquant_scale.empty() && antiquant_offset.empty(),
                "the host NPU multiplies groups without quantization only");
    products(x, weight, bias, differences(ends), outs);
}
const Formula<"aclnnGroupedMatmul", grouped> grouped_by_ints;

}  // namespace
}  // namespace host_npu
