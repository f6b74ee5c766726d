// aclnnConstantPadNd, with which torch_npu gives tensors one length before a collective gathers them.
#include "aclnnop/aclnn_constant_pad_nd.h"
#include "nnopbase/containers.h"
#include "nnopbase/two_phase.h"
#include "opapi/checks.h"
#include "opapi/copy.h"
#include "opapi/elements.h"

namespace host_npu {
namespace {

constexpr Api kPad{"aclnnConstantPadNd", "aclnnConstantPadNdGetWorkspaceSize"};

// What is put before and after the elements of a dimension.
struct Ends {
    std::int64_t before = 0;
    std::int64_t after = 0;
};

Ends ends_of(std::span<const std::int64_t> padding, std::size_t rank, std::size_t dimension) {
    const auto pair = 2 * (rank - 1 - dimension);
    return pair + 1 < padding.size() ? Ends{padding[pair], padding[pair + 1]} : Ends{};
}

// The part of `layout` that has an equal in the other tensor: `ends` are what this one has too much or, negative,
// lacks.
template <class EndsOf>
HostTensor part(const HostTensor& tensor, Layout& layout, const EndsOf& ends) {
    layout = *tensor.layout;
    auto* data = tensor.data;
    for (std::size_t dimension = 0; dimension < layout.shape.rank(); ++dimension) {
        const auto [before, after] = ends(dimension);
        const auto skipped = std::max<std::int64_t>(before, 0);
        layout.shape[dimension] -= skipped + std::max<std::int64_t>(after, 0);
        data += skipped * layout.strides[dimension] * static_cast<std::int64_t>(item_size(layout.dtype));
    }
    return {&layout, data};
}

void pad(const HostTensor& self, const HostTensor& out, const std::vector<std::int64_t>& padding,
         const aclScalar& value) {
    const Dims one;
    const Layout scalar{.shape = one, .strides = one, .storage_shape = one, .dtype = value.dtype};
    auto bytes = value.value;
    copy(out, {&scalar, bytes.data()});

    Layout inner, outer;
    const auto rank = out->shape.rank();
    const auto added = [&](std::size_t dimension) { return ends_of(padding, rank, dimension); };
    const auto cut = [&](std::size_t dimension) {
        const auto [before, after] = added(dimension);
        return Ends{-before, -after};
    };
    const auto to = part(out, outer, added), from = part(self, inner, cut);
    if (!inner.empty()) copy(to, from);
}

Plan plan(const Named& self, const aclIntArray* padding, const aclScalar* value, const Named& out) {
    require_present({self, out});
    require(padding != nullptr, kNullPointer, "padding is a null pointer");
    require(value != nullptr, kNullPointer, "value is a null pointer");
    require_same_dtype(out, self);
    require_rank_at_most_8({self, out});
    const auto rank = self->shape.rank();
    require(padding->values.size() % 2 == 0 && padding->values.size() <= 2 * rank, kParamInvalid, "padding has ",
            padding->values.size(), " numbers, where an even number of at most ", 2 * rank, " is accepted");
    Dims shape = self->shape;
    for (std::size_t dimension = 0; dimension < rank; ++dimension) {
        const auto [before, after] = ends_of(padding->values, rank, dimension);
        const auto cut = saturated_sum(std::min<std::int64_t>(before, 0), std::min<std::int64_t>(after, 0));
        require(saturated_sum(shape[dimension], cut) >= 0, kParamInvalid, "padding cuts more than dimension ",
                dimension, " has");
        shape[dimension] = saturated_sum(shape[dimension], saturated_sum(before, after));
    }
    require_shape(out, shape);
    if (out->empty()) return {};
    return {.kernel = [padding = padding->values, value = *value](const KernelArguments& arguments) {
        pad(arguments[0], arguments[1], padding, value);
    }};
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

aclnnStatus aclnnConstantPadNdGetWorkspaceSize(const aclTensor* self, const aclIntArray* padding,
                                               const aclScalar* value, aclTensor* out, std::uint64_t* workspaceSize,
                                               aclOpExecutor** executor) {
    return PhaseOne(kPad, workspaceSize, executor).with(self, out, padding, value).run([&] {
        return plan({"self", self}, padding, value, {"out", out});
    });
}

aclnnStatus aclnnConstantPadNd(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                               aclrtStream stream) {
    return phase_two(kPad, workspace, workspaceSize, executor, stream);
}
