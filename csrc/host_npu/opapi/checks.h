// The checks that operators have in common. Each throws the Refusal that phase one answers with.
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

// An argument, with the name that the documents give it.
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
// Refuses the layouts that tile a tensor for a compute unit.
void require_public_format(const Named& argument);
bool is_public_format(aclFormat format);

// The shape that all broadcast to, if there is one.
std::optional<Dims> broadcast(std::initializer_list<const Dims*> shapes);
Dims require_broadcast(Arguments arguments);

// The data type that mixed floating types are calculated in.
aclDataType promote(std::initializer_list<aclDataType> dtypes);

}  // namespace host_npu
