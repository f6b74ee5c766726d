// aclnnConstantPadNd, with which torch_npu's process group makes tensors end at multiples of 32 bytes.
#include <complex>
#include <memory>

#include "aclnnop/aclnn_constant_pad_nd.h"
#include "nnopbase/containers.h"
#include "nnopbase/two_phase.h"
#include "opapi/checks.h"
#include "opapi/elements.h"

namespace host_npu {
namespace {

constexpr Api kPad{"aclnnConstantPadNd", "aclnnConstantPadNdGetWorkspaceSize"};

constexpr DtypeSet kDtypes{ACL_FLOAT,  ACL_FLOAT16, ACL_BF16,  ACL_DOUBLE,    ACL_INT8,
                           ACL_INT16,  ACL_INT32,   ACL_INT64, ACL_UINT8,     ACL_UINT16,
                           ACL_UINT32, ACL_UINT64,  ACL_BOOL,  ACL_COMPLEX64, ACL_COMPLEX128};

void fill(const HostTensor& out, const aclScalar& value) {
    visit(out->dtype, [&]<class Stored>(Stored) {
        const auto block = std::make_unique<Stored[]>(kBlock);
        visit(value.dtype, [&]<class Given>(Given) {
            std::fill_n(block.get(), kBlock, convert<Stored>(load<Given>(value.value.data())));
        });
        Elements elements(out);
        const auto numel = out->numel();
        for (std::int64_t done = 0; done < numel; done += kBlock) {
            elements.write_stored<Stored>(block.get(), std::min(kBlock, numel - done));
        }
    });
}

// `before` has the elements in front of each dimension.
void pad(const HostTensor& self, const HostTensor& out, const Dims& before, const aclScalar& value) {
    fill(out, value);
    if (self->empty()) return;
    Layout inside = *out.layout;
    inside.shape = self->shape;
    auto* start = out.data;
    for (std::size_t dimension = 0; dimension < before.rank(); ++dimension) {
        start += before[dimension] * out->strides[dimension] * static_cast<std::int64_t>(item_size(out->dtype));
    }
    visit(out->dtype, [&]<class Stored>(Stored) {
        Elements source(self);
        Elements target(HostTensor{&inside, start});
        const auto block = std::make_unique<Stored[]>(kBlock);
        const auto numel = self->numel();
        for (std::int64_t done = 0; done < numel; done += kBlock) {
            const auto count = std::min(kBlock, numel - done);
            source.read_stored<Stored>(block.get(), count);
            target.write_stored<Stored>(block.get(), count);
        }
    });
}

Plan plan(const Named& self, const aclIntArray* padding, const aclScalar* value, const Named& out) {
    require_present({self, out});
    require(padding != nullptr, kNullPointer, "pad is null");
    require(value != nullptr, kNullPointer, "value is null");
    require_dtype(self, kDtypes);
    require(kDtypes.contains(value->dtype), kParamInvalid, "value has ", dtype_name(value->dtype));
    require_same_dtype(out, self);
    require_rank_at_most_8({self, out});
    const auto& pads = padding->values;
    const auto rank = self->shape.rank();
    require(pads.size() % 2 == 0 && pads.size() <= 2 * rank, kParamInvalid, "pad has ", pads.size(),
            " elements, which must be even and at most twice self's dimensions");
    Dims before = self->shape;
    Dims expected = self->shape;
    for (std::size_t dimension = 0; dimension < rank; ++dimension) {
        const auto from_last = rank - 1 - dimension;
        const bool is_padded = 2 * from_last < pads.size();
        before[dimension] = is_padded ? pads[2 * from_last] : 0;
        const auto after = is_padded ? pads[2 * from_last + 1] : 0;
        require(before[dimension] >= 0 && after >= 0, kParamInvalid, "the host NPU does not simulate a negative pad");
        expected[dimension] = saturated_sum(saturated_sum(before[dimension], self->shape[dimension]), after);
    }
    require_shape(out, expected);
    if (out->empty()) return {};
    return {.kernel = [before, value = *value](const KernelArguments& arguments) {
        pad(arguments[0], arguments[1], before, value);
    }};
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

aclnnStatus aclnnConstantPadNdGetWorkspaceSize(const aclTensor* self, const aclIntArray* pad, const aclScalar* value,
                                               aclTensor* out, std::uint64_t* workspaceSize, aclOpExecutor** executor) {
    PhaseOne phase(kPad, workspaceSize, executor);
    phase.with(self, out, pad != nullptr, value != nullptr);
    if (pad != nullptr) {
        for (const auto elements : pad->values) phase.with(elements);
    }
    if (value != nullptr) {
        phase.with(static_cast<int>(value->dtype));
        for (const auto byte : value->value) phase.with(static_cast<unsigned>(byte));
    }
    return phase.run([&] { return plan({"self", self}, pad, value, {"out", out}); });
}

HOST_NPU_PHASE_TWO(aclnnConstantPadNd, kPad)
