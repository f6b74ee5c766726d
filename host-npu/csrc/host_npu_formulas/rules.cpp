#include "host_npu_formulas/rules.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iostream>
#include <map>
#include <span>
#include <sstream>
#include <string_view>

#include "host_npu_formulas/scalar_type.h"
#include "nnopbase/status.h"
#include "opapi/chip.h"

namespace host_npu {
namespace ruled {
namespace {

constexpr std::array kNamed{ACL_FLOAT,         ACL_FLOAT16,     ACL_BF16,        ACL_DOUBLE,     ACL_INT8,   ACL_UINT8,
                            ACL_INT16,         ACL_INT32,       ACL_INT64,       ACL_UINT32,     ACL_UINT64, ACL_BOOL,
                            ACL_FLOAT8_E4M3FN, ACL_FLOAT8_E5M2, ACL_FLOAT8_E8M0, ACL_FLOAT4_E2M1};

// Formats alternatives: "a", "a or b", "a, b or c".
std::string either(const std::vector<std::string>& texts) {
    std::string joined;
    for (std::size_t index = 0; index < texts.size(); ++index) {
        if (index > 0) joined += index + 1 == texts.size() ? " or " : ", ";
        joined += texts[index];
    }
    return joined;
}

std::string in_brackets(const Dims& dims) {
    std::ostringstream text;
    text << '[';
    for (std::size_t index = 0; index < dims.rank(); ++index) text << (index > 0 ? ", " : "") << dims[index];
    text << ']';
    return text.str();
}

// The arguments of a call, with their rules if any.
class Call {
  public:
    Call(const Rules& rules, const TensorArguments& given) : rules_(rules), given_(given) {}

    std::size_t count() const { return given_.arguments.size(); }
    bool has_rules() const { return !rules_.tensors.empty(); }
    const TensorRule& rule(std::size_t argument) const { return rules_.tensors[argument]; }
    const Together& together() const { return rules_.together; }
    const TensorArgument& argument(std::size_t number) const { return given_.arguments[number]; }
    std::span<const aclTensor* const> tensors(std::size_t number) const {
        return std::span(given_.tensors).subspan(argument(number).first, argument(number).count);
    }
    std::string name(std::size_t number, std::size_t member) const {
        const auto name = has_rules() ? rule(number).name : "tensor " + std::to_string(number + 1);
        return argument(number).is_list ? name + "[" + std::to_string(member) + "]" : name;
    }
    // Returns the tensor of an argument, or null.
    const aclTensor* find(const std::string& name) const {
        for (std::size_t number = 0; number < count(); ++number) {
            if (rule(number).name == name) return tensors(number).empty() ? nullptr : tensors(number).front();
        }
        return nullptr;
    }

    template <class Body>
    void for_each(const Body& body) const {
        for (std::size_t number = 0; number < count(); ++number) {
            for (std::size_t member = 0; member < argument(number).count; ++member) {
                body(number, member, tensors(number)[member]);
            }
        }
    }

  private:
    const Rules& rules_;
    const TensorArguments& given_;
};

bool is_taken(aclDataType dtype, Taken taken) {
    const auto type = scalar_type(dtype);
    if (!type) return false;
    return taken == Taken::kAll || at::isFloatingType(*type) == (taken == Taken::kFloats);
}

// The documented dtypes of an argument.
class Allowed {
  public:
    Allowed(const Call& call, const Dtypes& dtypes)
        : set_(has_bfloat16() ? dtypes.these | dtypes.newer : dtypes.these), argument_(dtypes.of) {
        if (soc() == Soc::Ascend950) set_ = set_ | dtypes.of_950;
        const auto* as = argument_ == nullptr ? nullptr : call.find(argument_);
        if (as != nullptr) like_ = as->layout.dtype;
    }

    bool contains(aclDataType dtype) const {
        if (dtype == ACL_BF16 && !has_bfloat16()) return false;
        return dtype == like_ || set_.contains(dtype);
    }
    // Whether any dtype is allowed: no rule, or one that refers to an absent argument.
    bool all() const { return set_.empty() && like_ == ACL_DT_UNDEFINED; }

    std::string text() const {
        std::vector<std::string> texts;
        if (like_ != ACL_DT_UNDEFINED) texts.push_back(std::string(argument_) + "'s " + dtype_name(like_));
        for (const auto dtype : kNamed) {
            if (dtype != like_ && set_.contains(dtype) && contains(dtype)) texts.emplace_back(dtype_name(dtype));
        }
        return either(texts);
    }

  private:
    DtypeSet set_;
    const char* argument_;
    aclDataType like_ = ACL_DT_UNDEFINED;
};

void require_dtypes(const Call& call) {
    call.for_each([&](std::size_t number, std::size_t member, const aclTensor* tensor) {
        if (tensor == nullptr) return;
        const auto dtype = tensor->layout.dtype;
        const auto taken = call.argument(number).taken;
        const auto name = call.name(number, member);
        bool is_named = false;
        if (call.has_rules()) {
            const Allowed allowed(call, call.rule(number).dtypes);
            is_named = allowed.contains(dtype);
            require(allowed.all() || is_named, kParamInvalid, name, " has dtype ", dtype_name(dtype), " instead of ",
                    allowed.text());
        }
        const bool has_named_type = is_named && !scalar_type(dtype) && named_type(dtype);
        require(is_taken(dtype, taken) || has_named_type, kParamInvalid, name, " has dtype ", dtype_name(dtype),
                taken == Taken::kFloats ? " instead of float32, float16 or bfloat16"
                                        : ", which the host NPU does not take here");
    });
}

void require_together(const Call& call) {
    const auto& [arguments, rows] = call.together();
    const auto is_allowed = [&](const std::vector<aclDataType>& row) {
        for (std::size_t index = 0; index < row.size(); ++index) {
            const auto* tensor = call.find(arguments[index]);
            if (tensor != nullptr && tensor->layout.dtype != row[index]) return false;
        }
        return true;
    };
    if (rows.empty() || std::any_of(rows.begin(), rows.end(), is_allowed)) return;
    std::ostringstream text;
    for (const auto* argument : arguments) {
        const auto* tensor = call.find(argument);
        if (tensor != nullptr)
            text << (text.tellp() > 0 ? ", " : "") << argument << ' ' << dtype_name(tensor->layout.dtype);
    }
    require(false, kParamInvalid, "these dtypes cannot be combined: ", text.str());
}

// A dimension of a rule, such as `D%16<=512`, `...x` or `*`.
struct Dimension {
    std::string name;
    std::int64_t divisor = 1;
    std::int64_t most = -1;
    bool is_many = false;

    explicit Dimension(std::string text) {
        if (const auto at = text.find("<="); at != std::string::npos) {
            most = std::stoll(text.substr(at + 2));
            text.resize(at);
        }
        if (const auto at = text.find('%'); at != std::string::npos) {
            divisor = std::stoll(text.substr(at + 1));
            text.resize(at);
        }
        is_many = text.starts_with("...");
        name = text;
    }

    bool is_free() const { return name == "..." || name == "*"; }
    bool is_number() const { return name.find_first_not_of("0123456789") == std::string::npos; }
};

// The sizes of each name: one, or as many as `...x` matches.
using Sizes = std::map<std::string, std::vector<std::int64_t>>;

bool fits(const Dimension& dimension, std::span<const std::int64_t> these, Sizes& known) {
    for (const auto size : these) {
        if (size % dimension.divisor != 0 || (dimension.most >= 0 && size > dimension.most)) return false;
    }
    if (dimension.is_free()) return true;
    if (dimension.is_number()) return these[0] == std::stoll(dimension.name);
    const std::vector<std::int64_t> values(these.begin(), these.end());
    return known.try_emplace(dimension.name, values).first->second == values;
}

// One of the alternatives of a rule, which `|` separates.
class Shape {
  public:
    explicit Shape(const std::string& text) : text_(text) {
        std::istringstream words(text);
        for (std::string word; words >> word;) dimensions_.emplace_back(word);
    }

    // Records the sizes of the names on a match.
    bool matches(const Dims& dims, Sizes& known) const {
        const std::span<const std::int64_t> all(dims);
        std::size_t many = 0;
        for (const auto& dimension : dimensions_) many += dimension.is_many ? 1 : 0;
        const auto single = dimensions_.size() - many;
        if (all.size() < single || (many == 0 && all.size() != single)) return false;
        auto found = known;
        std::size_t next = 0;
        for (const auto& dimension : dimensions_) {
            const auto count = dimension.is_many ? all.size() - single : 1;
            if (!fits(dimension, all.subspan(next, count), found)) return false;
            next += count;
        }
        known = std::move(found);
        return true;
    }

    // Formats the shape, for example "[T, K]", with the known sizes of `...x`.
    std::string text(const Sizes& known) const {
        std::vector<std::string> words;
        std::istringstream text(text_);
        for (std::string word; text >> word;) {
            const Dimension dimension(word);
            const auto found = known.find(dimension.name);
            if (!dimension.is_many) {
                words.push_back(word);
            } else if (found == known.end()) {
                words.emplace_back("...");
            } else {
                for (const auto size : found->second) words.push_back(std::to_string(size));
            }
        }
        std::string joined;
        for (const auto& word : words) joined += (joined.empty() ? "" : ", ") + word;
        return "[" + joined + "]";
    }
    // Collects the known sizes of single dimensions.
    void add_known(const Sizes& known, Sizes& used) const {
        for (const auto& dimension : dimensions_) {
            const auto found = known.find(dimension.name);
            if (!dimension.is_many && found != known.end()) used.insert(*found);
        }
    }

  private:
    std::string text_;
    std::vector<Dimension> dimensions_;
};

std::vector<Shape> shapes(std::string_view rule) {
    std::vector<Shape> found;
    auto rest = rule;
    for (auto at = rest.find('|'); at != rest.npos; at = rest.find('|')) {
        found.emplace_back(std::string(rest.substr(0, at)));
        rest.remove_prefix(at + 1);
    }
    found.emplace_back(std::string(rest));
    return found;
}

std::string accepted(const std::vector<Shape>& allowed, const Sizes& known) {
    std::vector<std::string> texts;
    Sizes used;
    for (const auto& shape : allowed) {
        texts.push_back(shape.text(known));
        shape.add_known(known, used);
    }
    auto text = either(texts);
    const char* before = ", where ";
    for (const auto& [name, values] : used) {
        text += before + name + " is " + std::to_string(values[0]);
        before = " and ";
    }
    return text;
}

// Records the sizes of the rule's names. Throws a Refusal unless an alternative matches.
void require_shape(const std::string& name, const Dims& dims, std::string_view rule, Sizes& known) {
    const auto allowed = shapes(rule);
    for (const auto& shape : allowed) {
        if (shape.matches(dims, known)) return;
    }
    require(false, kParamInvalid, name, " has shape ", in_brackets(dims), " instead of ", accepted(allowed, known));
}

void require_shapes(const Call& call) {
    Sizes known;
    call.for_each([&](std::size_t number, std::size_t member, const aclTensor* tensor) {
        if (tensor == nullptr) return;
        auto of_member = known;
        auto& sizes_known = call.argument(number).is_list ? of_member : known;
        require_shape(call.name(number, member), tensor->layout.shape, call.rule(number).shape, sizes_known);
    });
}

}  // namespace
}  // namespace ruled

void require_one_for_each(const Rules& rules, std::size_t count, const char* function) {
    if (rules.tensors.empty() || rules.tensors.size() == count) return;
    std::cerr << "host_npu: " << function << " has " << rules.tensors.size() << " rules for " << count << " tensors\n";
    std::abort();
}

void require_shapes(const std::vector<Shaped>& tensors) {
    ruled::Sizes known;
    for (const auto& [name, sizes, shape] : tensors) ruled::require_shape(name, Dims(sizes), shape, known);
}

void require_rules(const Rules& rules, const TensorArguments& given) {
    const ruled::Call call(rules, given);
    call.for_each([&](std::size_t number, std::size_t member, const aclTensor* tensor) {
        require(tensor != nullptr || call.argument(number).may_be_absent, kNullPointer, call.name(number, member),
                " is a null pointer");
    });
    ruled::require_dtypes(call);
    ruled::require_together(call);
    call.for_each([&](std::size_t number, std::size_t member, const aclTensor* tensor) {
        require(tensor == nullptr || tensor->layout.shape.rank() <= 8, kParamInvalid, call.name(number, member),
                " has more than 8 dimensions");
    });
    if (call.has_rules()) ruled::require_shapes(call);
}

}  // namespace host_npu
