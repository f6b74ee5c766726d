#include "ascendcl/settings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "ascendcl/error.h"
#include "ascendcl/host_limits.h"

namespace host_npu {
namespace {

struct Chip {
    Soc soc;
    std::string_view setting;
    std::string name;
    CoreCounts cores;
};

const std::array<Chip, 5>& chips() {
    static const auto& all = *new std::array<Chip, 5>{{
        {Soc::Ascend910, "Ascend910", "Ascend910A", {32, 32}},
        {Soc::Ascend910B, "Ascend910B", "Ascend910B1", {24, 48}},
        {Soc::Ascend910_93, "Ascend910_93", "Ascend910_9391", {24, 48}},
        {Soc::Ascend310P, "Ascend310P", "Ascend310P3", {8, 8}},
        {Soc::Ascend950, "Ascend950", "Ascend950PR_9599", {32, 64}},
    }};
    return all;
}

const Chip& chip() {
    static const Chip& chosen = []() -> const Chip& {
        const char* const setting = std::getenv("HOST_NPU_SOC");
        const std::string_view wanted = setting == nullptr ? "Ascend910B" : setting;
        const auto found =
            std::find_if(chips().begin(), chips().end(), [&](const Chip& one) { return one.setting == wanted; });
        if (found == chips().end()) {
            throw Error(ACL_ERROR_RT_SOC_VERSION,
                        "HOST_NPU_SOC must be one of Ascend910, Ascend910B, Ascend910_93, Ascend310P, "
                        "Ascend950, got '" +
                            std::string(wanted) + "'");
        }
        return *found;
    }();
    return chosen;
}

std::optional<std::int64_t> positive_number(const char* name, std::int64_t largest) {
    const char* const setting = std::getenv(name);
    if (setting == nullptr) return std::nullopt;
    const std::string_view text = setting;
    std::int64_t value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec != std::errc() || result.ptr != text.data() + text.size() || value < 1 || value > largest) {
        throw Error(ACL_ERROR_RT_PARAM_INVALID, std::string(name) + " must be a whole number from 1 to " +
                                                    std::to_string(largest) + ", got '" + setting + "'");
    }
    return value;
}

}  // namespace

Soc soc() { return chip().soc; }

const std::string& soc_name() { return chip().name; }

CoreCounts core_counts() { return chip().cores; }

std::int32_t device_count() {
    static const auto count = static_cast<std::int32_t>(positive_number("HOST_NPU_DEVICES", 64).value_or(1));
    return count;
}

bool strict_memory() {
    static const bool strict = [] {
        const char* const setting = std::getenv("HOST_NPU_STRICT_MEMORY");
        const std::string_view text = setting == nullptr ? "0" : setting;
        if (text != "0" && text != "1") {
            throw Error(ACL_ERROR_RT_PARAM_INVALID,
                        "HOST_NPU_STRICT_MEMORY must be 0 or 1, got '" + std::string(text) + "'");
        }
        return text == "1";
    }();
    return strict;
}

std::size_t device_memory_bytes() {
    static const std::size_t bytes = [] {
        constexpr std::size_t mebibyte = std::size_t{1} << 20;
        if (const auto setting = positive_number("HOST_NPU_MEMORY", 1 << 20)) {
            return static_cast<std::size_t>(*setting) * mebibyte;
        }
        // The memory of an Atlas A2 card, limited to an equal share of the host's memory.
        const auto share = std::min(std::size_t{64} << 30, host_memory_bytes() / device_count());
        return std::max(mebibyte, share / mebibyte * mebibyte);
    }();
    return bytes;
}

bool memory_is_set() {
    static const bool set = std::getenv("HOST_NPU_MEMORY") != nullptr;
    return set;
}

}  // namespace host_npu
