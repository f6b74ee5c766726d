#include "opapi/checks.h"

#include <algorithm>

namespace host_npu {

std::string to_string(const Dims& dims) {
    std::string text = "[";
    for (std::size_t index = 0; index < dims.rank(); ++index) {
        if (index > 0) text += ", ";
        text += std::to_string(dims[index]);
    }
    return text + "]";
}

void require_present(Arguments arguments, aclnnStatus status) {
    for (const auto& argument : arguments) {
        require(argument.tensor != nullptr, status, argument.name, " is a null pointer");
    }
}

void require_dtype(const Named& argument, DtypeSet allowed) {
    require(allowed.contains(argument->dtype), kParamInvalid, argument.name, " has dtype ", dtype_name(argument->dtype),
            ", which the operator does not take on this chip");
}

void require_same_dtype(const Named& argument, const Named& as) {
    require(argument->dtype == as->dtype, kParamInvalid, argument.name, " has dtype ", dtype_name(argument->dtype),
            ", which differs from ", as.name, "'s ", dtype_name(as->dtype));
}

void require_rank_at_most_8(Arguments arguments) {
    for (const auto& argument : arguments) {
        require(argument->shape.rank() <= kMaxRank, kParamInvalid, argument.name, " has ", argument->shape.rank(),
                " dimensions; at most 8 are allowed");
    }
}

void require_rank(const Named& argument, std::size_t rank) {
    require(argument->shape.rank() == rank, kParamInvalid, argument.name, " has ", argument->shape.rank(),
            " dimensions instead of ", rank);
}

void require_shape(const Named& argument, const Dims& expected) {
    if (argument->shape == expected) return;
    require(false, kParamInvalid, argument.name, " has shape ", to_string(argument->shape), " instead of ",
            to_string(expected));
}

void require_reduction(std::int64_t reduction) {
    require(reduction >= 0 && reduction <= 2, kParamInvalid, "reduction is ", reduction,
            "; it has to be 0 (none), 1 (mean) or 2 (sum)");
}

bool is_private_format(aclFormat format) {
    const int number = format;
    // FRACTAL_NZ of several widths, which older headers do not name.
    if (number == kFormatFractalZ3d || (number >= 50 && number <= 54)) return true;
    switch (format) {
        case ACL_FORMAT_NC1HWC0:
        case ACL_FORMAT_FRACTAL_Z:
        case ACL_FORMAT_NC1HWC0_C04:
        case ACL_FORMAT_FRACTAL_NZ:
        case ACL_FORMAT_NDC1HWC0:
            return true;
        default:
            return false;
    }
}

void require_public_format(const Named& argument) {
    require(!is_private_format(argument->format), kParamInvalid, argument.name, " has the private format ",
            static_cast<int>(argument->format));
}

bool same_format(aclFormat first, aclFormat second) {
    const auto known = [](int format) { return format == ACL_FORMAT_UNDEFINED ? 0xFF : format; };
    return known(first) == known(second);
}

bool is_copied(const Layout& layout) {
    return !is_private_format(layout.format) && layout.numel() > 1 && !layout.contiguous();
}

void require_copyable(Arguments inputs) {
    for (const auto& input : inputs) {
        if (input.tensor == nullptr || !is_copied(input.layout())) continue;
        const auto [first, last] = input->reach();
        require(first >= 0 && last < input->storage_shape.numel(), kInnerNullPointer, input.name, "'s elements ", first,
                " to ", last, " are not all in its storage of ", to_string(input->storage_shape));
    }
}

bool Result::has_shape_of(const Layout& out) const {
    return shape == out.shape || (shape.numel() == 1 && out.numel() == 1);
}

void require_view_copy(const Result& result, const Named& out) {
    require(result.dtype == out->dtype, kInnerNullPointer, "the result has dtype ", dtype_name(result.dtype), ", ",
            out.name, " has ", dtype_name(out->dtype));
    require(result.format == ACL_FORMAT_ND || same_format(result.format, out->format), kInnerNullPointer,
            "the result has format ", static_cast<int>(result.format), ", ", out.name, " has ",
            static_cast<int>(out->format));
    if (!result.has_shape_of(out.layout())) {
        require(false, kInnerNullPointer, "the result has shape ", to_string(result.shape), ", ", out.name, " has ",
                to_string(out->shape));
    }
}

std::optional<Dims> broadcast(std::initializer_list<const Dims*> shapes) {
    std::size_t rank = 0;
    for (const auto* shape : shapes) rank = std::max(rank, shape->rank());
    Dims result;
    for (std::size_t index = 0; index < rank; ++index) {
        std::int64_t common = 1;
        for (const auto* shape : shapes) {
            const auto missing = rank - shape->rank();
            const auto size = index < missing ? 1 : (*shape)[index - missing];
            if (size != 1 && common != 1 && size != common) return std::nullopt;
            if (size != 1) common = size;
        }
        result.push_back(common);
    }
    return result;
}

Dims require_broadcast(Arguments arguments) {
    Dims result;
    const Named* before = nullptr;
    for (const auto& argument : arguments) {
        const auto common = broadcast({&result, &argument->shape});
        if (!common) {
            require(false, kParamInvalid, argument.name, "'s shape ", to_string(argument->shape),
                    " does not broadcast with ", to_string(result), " of the arguments up to ", before->name);
        }
        result = *common;
        before = &argument;
    }
    return result;
}

aclDataType promote(std::initializer_list<aclDataType> dtypes) {
    const auto first = *dtypes.begin();
    const bool same = std::all_of(dtypes.begin(), dtypes.end(), [=](aclDataType dtype) { return dtype == first; });
    return same ? first : ACL_FLOAT;
}

}  // namespace host_npu
