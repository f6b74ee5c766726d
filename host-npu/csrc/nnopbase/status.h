// Status codes and errors of the aclnn interface.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <type_traits>

#include "aclnn/acl_meta.h"
#include "ascendcl/device.h"

namespace host_npu {

inline constexpr aclnnStatus kSuccess = 0;
inline constexpr aclnnStatus kNullPointer = 161001;
inline constexpr aclnnStatus kParamInvalid = 161002;
inline constexpr aclnnStatus kRuntimeError = 361001;
inline constexpr aclnnStatus kInnerError = 561000;
inline constexpr aclnnStatus kTilingError = 561002;
inline constexpr aclnnStatus kFindKernelError = 561003;
inline constexpr aclnnStatus kInnerNullPointer = 561103;

// Reports that `function` failed with `status` and returns the status.
inline aclnnStatus failed(aclnnStatus status, const char* function, const std::string& why) {
    report_error(status, std::string(function) + ": " + why);
    return status;
}

// Runs the body of an exported function, or returns the failure that a test injected into this call.
template <class Body>
aclnnStatus unless_it_fails(const char* function, const Body& body) {
    if (const auto failure = injected_failure(function)) return failed(failure->first, function, failure->second);
    return body();
}

// The status and message of a refused call. An empty message is not logged.
struct Refusal {
    aclnnStatus status;
    std::string text;
};

// Throws a Refusal, whose message is formatted from `parts`.
template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void throw_refusal(aclnnStatus status, Parts... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Refusal{status, text.str()};
}

// Throws a Refusal unless `fine`. Literals of all lengths are formatted by the same code.
template <class... Parts>
void require(bool fine, aclnnStatus status, const Parts&... parts) {
    if (!fine) throw_refusal<std::decay_t<const Parts>...>(status, parts...);
}

}  // namespace host_npu
