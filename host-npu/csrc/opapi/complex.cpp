// aclnnComplex, with which torch_npu copies a tensor that is marked as the conjugate of its memory.
#include <complex>

#include "aclnnop/aclnn_complex.h"
#include "nnopbase/two_phase.h"
#include "opapi/checks.h"
#include "opapi/elements.h"

namespace host_npu {
namespace {

constexpr Api kComplex{"aclnnComplex", "aclnnComplexGetWorkspaceSize"};

void combine(const HostTensor& real, const HostTensor& imag, const HostTensor& out) {
    Elements reals(real, out->shape);
    Elements imags(imag, out->shape);
    Elements results(out);
    const auto parts = std::make_unique<double[]>(2 * kBlock);
    const auto block = std::make_unique<std::complex<double>[]>(kBlock);
    const auto numel = out->numel();
    for (std::int64_t done = 0; done < numel; done += kBlock) {
        const auto count = std::min(kBlock, numel - done);
        reals.read(parts.get(), count);
        imags.read(parts.get() + kBlock, count);
        for (std::int64_t index = 0; index < count; ++index) block[index] = {parts[index], parts[kBlock + index]};
        results.write(block.get(), count);
    }
}

Plan plan(const Named& real, const Named& imag, const Named& out) {
    require_present({real, imag, out});
    // Half-precision parts would make complex32, which no other operator of the host NPU takes.
    require_dtype(real, DtypeSet{ACL_FLOAT, ACL_DOUBLE});
    require(real->dtype == imag->dtype, kParamInvalid, "real and imag must have one dtype");
    require_dtype(out, real->dtype == ACL_DOUBLE ? DtypeSet{ACL_COMPLEX128} : DtypeSet{ACL_COMPLEX64});
    require_rank_at_most_8({real, imag, out});
    const auto common = broadcast({&real->shape, &imag->shape});
    require(common == out->shape, kParamInvalid, "out must have the shape that real and imag broadcast to");
    if (out->empty()) return {};
    return {.kernel = [](const KernelArguments& arguments) { combine(arguments[0], arguments[1], arguments[2]); }};
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

aclnnStatus aclnnComplexGetWorkspaceSize(const aclTensor* real, const aclTensor* imag, aclTensor* out,
                                         std::uint64_t* workspaceSize, aclOpExecutor** executor) {
    return PhaseOne(kComplex, workspaceSize, executor).with(real, imag, out).run([&] {
        return plan({"real", real}, {"imag", imag}, {"out", out});
    });
}

HOST_NPU_PHASE_TWO(aclnnComplex, kComplex)
