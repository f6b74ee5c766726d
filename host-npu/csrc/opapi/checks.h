// Checks shared by operators. Each throws the Refusal that phase one returns.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>

#include "nnopbase/dtype.h"
#include "nnopbase/status.h"
#include "nnopbase/tensor.h"

namespace host_npu {

inline constexpr std::size_t kMaxRank = 8;

// An argument with its documented name.
struct Named {
    const char* name;
    const aclTensor* tensor;

    const Layout* operator->() const { return &tensor->layout; }
    const Layout& layout() const { return tensor->layout; }
};

using Arguments = std::initializer_list<Named>;

std::string to_string(const Dims& dims);

void require_present(Arguments arguments, aclnnStatus status = kNullPointer);
void require_dtype(const Named& argument, DtypeSet allowed);
void require_same_dtype(const Named& argument, const Named& as);
void require_rank_at_most_8(Arguments arguments);
void require_rank(const Named& argument, std::size_t rank);
void require_shape(const Named& argument, const Dims& expected);
void require_reduction(std::int64_t reduction);

// Formats that the published headers do not name.
inline constexpr int kFormatFractalZC04 = 13;
inline constexpr int kFormatDhwcn = 31;
inline constexpr int kFormatFractalZ3d = 33;

// The layouts that tile a tensor for a compute unit.
bool is_private_format(aclFormat format);
void require_public_format(const Named& argument);

// Whether the kernel gets a contiguous copy of the tensor.
bool is_copied(const Layout& layout);
// Refuses strided inputs that extend beyond their storage. Only the copy checks this, so contiguous inputs pass.
void require_copyable(Arguments inputs);

// Whether the formats are equal. CANN stores the undefined format, -1, as a byte, 0xFF.
bool same_format(aclFormat first, aclFormat second);

// The result of a kernel, before it is copied to an output.
struct Result {
    Dims shape;
    aclDataType dtype;
    aclFormat format = ACL_FORMAT_ND;

    // Tensors of one element match whatever their rank.
    bool has_shape_of(const Layout& out) const;
};

// Refuses an output that the result cannot be copied to.
void require_view_copy(const Result& result, const Named& out);

// Returns the common broadcast shape, or nullopt.
std::optional<Dims> broadcast(std::initializer_list<const Dims*> shapes);
Dims require_broadcast(Arguments arguments);

// The data type in which mixed floating types are computed.
aclDataType promote(std::initializer_list<aclDataType> dtypes);

}  // namespace host_npu
