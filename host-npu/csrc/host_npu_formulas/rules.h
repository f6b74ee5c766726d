// What CANN's documents say of a function's tensors, stated where its formula is declared:
//
//     const Formula<"aclnnMoeTokenPermute", permute> permute_tokens{
//         {"tokens", kFloats, "T H"},
//         {"indices", kIndices, "T K<=512 | T"},
//         {"permuteTokensOut", as("tokens"), "* H"},
//         {"sortedIndicesOut", {ACL_INT32}, "*"},
//     };
//
// There is a rule for each tensor and list of tensors, in the order of the arguments. What a document leaves open stays
// out. A dtype may be that of another argument, `as("x")`, and others besides, `as("x") | kFloat`. Chips without
// arithmetic in bfloat16 (910 and 310P) take no bfloat16, and nothing that is `newer(...)`; only the Ascend950 takes
// what is `on_950(...)`. Where a document has a table of dtypes that go together, `Together` has it.
//
// Shapes are written as dimensions, with `|` between alternatives:
//
//     T         the same size wherever the name is used
//     64        this size
//     *         any size
//     ...       any number of dimensions; `...x` the same ones wherever that name is used
//     D%16<=512 the size has to be a multiple of 16, and 512 at most
//
// Nothing at all, as behind the `|` of "1 |", is a tensor without dimensions.
//
// In a list each tensor has its own sizes, except for names that an argument before the list has.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "nnopbase/dtype.h"
#include "nnopbase/tensor.h"

namespace host_npu {

// The dtypes that an argument may have; all if nothing is said.
struct Dtypes {
    DtypeSet these{};
    // Those that only chips with arithmetic in bfloat16 take, and only the Ascend950.
    DtypeSet newer{}, of_950{};
    // An argument whose dtype it may have.
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

// Dtypes that go together, a row for each choice. An argument that is absent has any.
struct Together {
    std::vector<const char*> arguments;
    std::vector<std::vector<aclDataType>> rows;
};

struct Rules {
    TensorRules tensors;
    Together together = {};
};

// What a formula takes of an argument, whatever the documents say.
enum class Taken { kFloats, kIntegers, kAll };

// The tensors of a call, in the order of its arguments.
using Tensors = std::vector<const aclTensor*>;

struct TensorArgument {
    Taken taken;
    bool may_be_absent;
    bool is_list;
    // Among the tensors.
    std::size_t first, count;
};

struct TensorArguments {
    Tensors tensors;
    std::vector<TensorArgument> arguments;

    void add(const aclTensor* tensor, Taken taken, bool may_be_absent) {
        arguments.push_back({taken, may_be_absent, false, tensors.size(), 1});
        tensors.push_back(tensor);
    }
    // A list that is absent is empty.
    void add(const aclTensorList* list, Taken taken) {
        const auto count = list == nullptr ? 0 : list->members.size();
        arguments.push_back({taken, false, true, tensors.size(), count});
        for (std::size_t member = 0; member < count; ++member) tensors.push_back(list->members[member]);
    }
};

// Ends the program, while the libraries are loaded, if a function of `count` tensors and lists has other rules.
void require_one_for_each(const Rules& rules, std::size_t count, const char* function);
// A tensor that a formula was given, and the shape that it has to have for these arguments, in the notation above.
struct Shaped {
    const char* name;
    std::span<const std::int64_t> sizes;
    std::string shape;
};
// Throws a Refusal if one of the tensors has another shape. A name stands for the same size in all of them.
void require_shapes(const std::vector<Shaped>& tensors);

// Throws a Refusal if the tensors of a call are not as they should be: a null pointer is 161001, what is wrong 161002.
// If there are no rules, the message says what the formula accepts.
void require_rules(const Rules& rules, const TensorArguments& given);

}  // namespace host_npu
