// The documented dtypes and shapes of CANN's functions, stated where a formula is declared:
//
//     const Formula<"aclnnMoeTokenPermute", permute> permute_tokens{
//         {"tokens", kFloats, "T H"},
//         {"indices", kIndices, "T K<=512 | T"},
//         {"permuteTokensOut", as("tokens"), "* H"},
//         {"sortedIndicesOut", {ACL_INT32}, "*"},
//     };
//
// There is a rule for each tensor and list of tensors, in the order of the arguments. Undocumented dtypes and shapes
// are omitted. A dtype may be that of another argument, `as("x")`, possibly among others, `as("x") | kFloat`. Chips
// without bfloat16 arithmetic (910 and 310P) take neither bfloat16 nor `newer(...)` dtypes; only the Ascend950 takes
// `on_950(...)` dtypes. A documented table of valid combinations becomes a `Together`.
//
// Shapes are written as dimensions, with `|` between alternatives:
//
//     T         the same size wherever the name is used
//     64        this size
//     *         any size
//     ...       any number of dimensions; `...x` the same ones wherever that name is used
//     D%16<=512 the size has to be a multiple of 16, and 512 at most
//
// An empty alternative, as after the `|` of "1 |", is a tensor without dimensions.
//
// Each tensor of a list has its own sizes, except for names used by an earlier argument.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "nnopbase/dtype.h"
#include "nnopbase/tensor.h"

namespace host_npu {

// The allowed dtypes of an argument; any if empty.
struct Dtypes {
    DtypeSet these{};
    // Dtypes only for chips with bfloat16 arithmetic, and only for the Ascend950.
    DtypeSet newer{}, of_950{};
    // Another argument, whose dtype is also allowed.
    const char* of = nullptr;

    constexpr Dtypes() = default;
    constexpr Dtypes(std::initializer_list<aclDataType> dtypes) : these(dtypes) {}

    constexpr Dtypes operator|(const Dtypes& other) const {
        auto both = *this;
        both.these = these | other.these;
        both.newer = newer | other.newer;
        both.of_950 = of_950 | other.of_950;
        if (both.of == nullptr) both.of = other.of;
        return both;
    }
};

constexpr Dtypes as(const char* argument) {
    Dtypes dtypes;
    dtypes.of = argument;
    return dtypes;
}
constexpr Dtypes newer(const Dtypes& these) {
    Dtypes dtypes;
    dtypes.newer = these.these;
    return dtypes;
}

constexpr Dtypes on_950(const Dtypes& these) {
    Dtypes dtypes;
    dtypes.of_950 = these.these;
    return dtypes;
}

inline constexpr Dtypes kFloat{ACL_FLOAT};
inline constexpr Dtypes kHalves{ACL_FLOAT16, ACL_BF16};
inline constexpr Dtypes kFloats{ACL_FLOAT, ACL_FLOAT16, ACL_BF16};
inline constexpr Dtypes kIndices{ACL_INT32, ACL_INT64};

struct TensorRule {
    const char* name;
    Dtypes dtypes = {};
    const char* shape = "...";
};
using TensorRules = std::vector<TensorRule>;

// Valid combinations of dtypes, one per row. An absent argument matches any dtype.
struct Together {
    std::vector<const char*> arguments;
    std::vector<std::vector<aclDataType>> rows;
};

struct Rules {
    TensorRules tensors;
    Together together = {};
};

// The kind of dtypes that a formula's parameter accepts, apart from the documents.
enum class Taken { kFloats, kIntegers, kAll };

// The tensors of a call, in the order of its arguments.
using Tensors = std::vector<const aclTensor*>;

struct TensorArgument {
    Taken taken;
    bool may_be_absent;
    bool is_list;
    // The range of this argument's tensors among those of the call.
    std::size_t first, count;
};

struct TensorArguments {
    Tensors tensors;
    std::vector<TensorArgument> arguments;

    void add(const aclTensor* tensor, Taken taken, bool may_be_absent) {
        arguments.push_back({taken, may_be_absent, false, tensors.size(), 1});
        tensors.push_back(tensor);
    }
    // An absent list is an empty list.
    void add(const aclTensorList* list, Taken taken) {
        const auto count = list == nullptr ? 0 : list->members.size();
        arguments.push_back({taken, false, true, tensors.size(), count});
        for (std::size_t member = 0; member < count; ++member) tensors.push_back(list->members[member]);
    }
};

// Ends the program, at load time, if there are rules but not one for each of `count` tensors and lists.
void require_one_for_each(const Rules& rules, std::size_t count, const char* function);
// A tensor's name and sizes, and its expected shape in the notation above.
struct Shaped {
    const char* name;
    std::span<const std::int64_t> sizes;
    std::string shape;
};
// Throws a Refusal if a tensor has another shape. A name has the same size in all of them.
void require_shapes(const std::vector<Shaped>& tensors);

// Throws a Refusal for invalid tensors: 161001 for a null pointer, 161002 otherwise. Without rules, the message states
// what the formula accepts.
void require_rules(const Rules& rules, const TensorArguments& given);

}  // namespace host_npu
