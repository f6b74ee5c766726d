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

bool is_public_format(aclFormat format) {
    switch (format) {
        case ACL_FORMAT_ND:
        case ACL_FORMAT_NCHW:
        case ACL_FORMAT_NHWC:
        case ACL_FORMAT_HWCN:
        case ACL_FORMAT_NDHWC:
        case ACL_FORMAT_NCDHW:
        case ACL_FORMAT_NC:
        case ACL_FORMAT_NCL:
            return true;
        default:
            return false;
    }
}

void require_public_format(const Named& argument) {
    require(is_public_format(argument->format), kParamInvalid, argument.name, " has the private format ",
            static_cast<int>(argument->format));
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
