// aclnnInplaceCopy: strided, broadcasting, casting; and aclnnCast, with which torch_npu's process group pads booleans.
#include <complex>
#include <cstring>

#include "nnopbase/two_phase.h"
#include "opapi/checks.h"
#include "opapi/chip.h"
#include "opapi/elements.h"
#include "opapi/workspace.h"

namespace host_npu {
namespace {

constexpr DtypeSet kFloating{ACL_FLOAT, ACL_FLOAT16, ACL_BF16, ACL_DOUBLE};
constexpr DtypeSet kAtMost32Bits{ACL_FLOAT, ACL_FLOAT16, ACL_BF16};
constexpr DtypeSet kIntegers{ACL_INT8,   ACL_INT16,  ACL_INT32,  ACL_INT64, ACL_UINT8,
                             ACL_UINT16, ACL_UINT32, ACL_UINT64, ACL_BOOL};
constexpr DtypeSet kComplex{ACL_COMPLEX64, ACL_COMPLEX128};
// Supported on the Ascend950.
constexpr DtypeSet kFloat8{ACL_FLOAT8_E4M3FN, ACL_FLOAT8_E5M2};

// Calls `copy_block(block, elements)` until all elements of `to` have been copied.
template <class Value, class CopyBlock>
void copy_blocks(const HostTensor& to, const CopyBlock& copy_block) {
    const auto block = std::make_unique<Value[]>(kBlock);
    const auto numel = to->numel();
    for (std::int64_t done = 0; done < numel; done += kBlock) copy_block(block.get(), std::min(kBlock, numel - done));
}

// Converts through `Between`, which represents every value of the source.
template <class Between>
void copy_as(const HostTensor& to, const HostTensor& from) {
    Elements source(from, to->shape);
    Elements destination(to);
    copy_blocks<Between>(to, [&](Between* block, std::int64_t count) {
        source.read(block, count);
        destination.write(block, count);
    });
}

void copy_unconverted(const HostTensor& to, const HostTensor& from) {
    Elements source(from, to->shape);
    Elements destination(to);
    visit(kFloat8.contains(to->dtype) ? ACL_UINT8 : to->dtype, [&]<class Value>(Value) {
        copy_blocks<Value>(to, [&](Value* block, std::int64_t count) {
            source.read_stored<Value>(block, count);
            destination.write_stored<Value>(block, count);
        });
    });
}

// e5m2 is the upper half of a float16. e4m3fn has one exponent bit less, a bias that differs by 8, and no infinity.
float widen_float8(aclDataType dtype, std::uint8_t bits) {
    if (dtype == ACL_FLOAT8_E5M2) return widen(Float16{static_cast<std::uint16_t>(bits << 8)});
    if ((bits & 0x7Fu) == 0x7Fu) return std::numeric_limits<float>::quiet_NaN();
    return 256 * widen(Float16{static_cast<std::uint16_t>((bits & 0x80u) << 8 | (bits & 0x7Fu) << 7)});
}

void copy_from_float8(const HostTensor& to, const HostTensor& from) {
    Elements source(from, to->shape);
    Elements destination(to);
    std::array<float, kBlock> floats;
    copy_blocks<std::uint8_t>(to, [&](std::uint8_t* block, std::int64_t count) {
        source.read_stored<std::uint8_t>(block, count);
        for (std::int64_t index = 0; index < count; ++index) floats[index] = widen_float8(from->dtype, block[index]);
        destination.write(floats.data(), count);
    });
}

void copy(const HostTensor& to, const HostTensor& from) {
    if (to->dtype == from->dtype && to->contiguous() && from->contiguous() && to->shape == from->shape) {
        std::memmove(to.data, from.data, static_cast<std::size_t>(to->numel()) * item_size(to->dtype));
    } else if (to->dtype == from->dtype) {
        copy_unconverted(to, from);
    } else if (kFloat8.contains(from->dtype)) {
        copy_from_float8(to, from);
    } else if (kComplex.contains(from->dtype)) {
        copy_as<std::complex<double>>(to, from);
    } else if (from->dtype == ACL_UINT64) {
        copy_as<std::uint64_t>(to, from);
    } else if (kIntegers.contains(from->dtype)) {
        copy_as<std::int64_t>(to, from);
    } else if (kAtMost32Bits.contains(from->dtype) && kAtMost32Bits.contains(to->dtype)) {
        copy_as<float>(to, from);
    } else {
        copy_as<double>(to, from);
    }
}

void check(Arguments arguments) {
    require_present(arguments);
    const auto dtypes = kFloating | kIntegers | kComplex | (soc() == Soc::Ascend950 ? kFloat8 : DtypeSet{});
    for (const auto& argument : arguments) {
        require_dtype(argument, dtypes);
        require(has_bfloat16() || argument->dtype != ACL_BF16, kParamInvalid, argument.name,
                " has dtype bfloat16, which this chip does not have");
    }
    require_rank_at_most_8(arguments);
}

// CANN also rounds float32 to 8 bits, but does not document the result for numbers out of range.
void require_conversion(aclDataType from, aclDataType to) {
    const bool exists = !kFloat8.contains(from) || kAtMost32Bits.contains(to);
    require(from == to || (exists && !kFloat8.contains(to)), kParamInvalid, "the host NPU does not convert ",
            dtype_name(from), " to ", dtype_name(to));
}

Plan plan_copy(const Named& self, const Named& src) {
    check({self, src});
    require_conversion(src->dtype, self->dtype);
    const auto common = broadcast({&self->shape, &src->shape});
    if (common != self->shape) {
        require(false, kParamInvalid, "src's shape ", to_string(src->shape), " does not broadcast to selfRef's ",
                to_string(self->shape));
    }
    if (self->empty() || src->empty()) return {};

    Intermediates intermediates;
    if (self->dtype != src->dtype) intermediates.argument(src.layout(), self->dtype);
    return {.workspace_size = intermediates.total(),
            .kernel = [](const KernelArguments& arguments) { copy(arguments[0], arguments[1]); }};
}

Plan plan_cast(const Named& self, aclDataType dtype, const Named& out) {
    check({self, out});
    require_conversion(self->dtype, out->dtype);
    require(out->dtype == dtype, kParamInvalid, "dtype is ", dtype_name(dtype), ", out has ", dtype_name(out->dtype));
    require_shape(out, self->shape);
    if (self->empty()) return {};
    return {.kernel = [](const KernelArguments& arguments) { copy(arguments[1], arguments[0]); }};
}

}  // namespace
}  // namespace host_npu

using namespace host_npu;

HOST_NPU_PHASE_TWO(aclnnInplaceCopy, kCopy)
HOST_NPU_PHASE_ONE aclnnInplaceCopyGetWorkspaceSize(aclTensor* selfRef, const aclTensor* src,
                                                    std::uint64_t* workspaceSize, aclOpExecutor** executor) {
    return PhaseOne(kCopy, workspaceSize, executor).with(selfRef, src).run([&] {
        return plan_copy({"selfRef", selfRef}, {"src", src});
    });
}

HOST_NPU_PHASE_TWO(aclnnCast, kCast)
HOST_NPU_PHASE_ONE aclnnCastGetWorkspaceSize(const aclTensor* self, const aclDataType dtype, aclTensor* out,
                                             std::uint64_t* workspaceSize, aclOpExecutor** executor) {
    return PhaseOne(kCast, workspaceSize, executor).with(self, out, static_cast<int>(dtype)).run([&] {
        return plan_cast({"self", self}, dtype, {"out", out});
    });
}
