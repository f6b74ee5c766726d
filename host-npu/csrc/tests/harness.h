// The test harness: each case prints "ok NAME" or "FAILED NAME: why".
#pragma once

#include <cmath>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace test {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string join(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

template <class... Parts>
void expect(bool fine, const Parts&... parts) {
    if (!fine) throw Failure(join(parts...));
}

template <class Actual, class Expected, class... Parts>
void expect_equal(const Actual& actual, const Expected& expected, const Parts&... what) {
    if (!(actual == expected)) throw Failure(join(what..., " is ", actual, ", expected ", expected));
}

// |actual - expected| <= tolerance * max(1, |expected|), element by element; NaN equals NaN.
inline void expect_close(const std::vector<double>& actual, const std::vector<double>& expected, double tolerance,
                         const std::string& what) {
    expect_equal(actual.size(), expected.size(), what, ": the number of elements");
    for (std::size_t index = 0; index < actual.size(); ++index) {
        const bool both_nan = std::isnan(actual[index]) && std::isnan(expected[index]);
        const double allowed = tolerance * std::fmax(1.0, std::fabs(expected[index]));
        if (both_nan || actual[index] == expected[index]) continue;
        expect(std::fabs(actual[index] - expected[index]) <= allowed, what, "[", index, "] is ", actual[index],
               ", expected ", expected[index]);
    }
}

inline const std::vector<std::string> kAllSocs{"Ascend910", "Ascend910B", "Ascend910_93", "Ascend310P", "Ascend950"};

// A case, which CASE registers.
struct Case {
    Case(std::function<void()> body, const char* name, std::vector<std::string> configurations = {"Ascend910B"});

    std::function<void()> body;
    std::string name;
    std::vector<std::string> configurations;
};

// CASE("name", {"Ascend950"}) { ... } runs in these configurations of the process, by default on an Ascend910B.
#define CASE(...) CASE_AT(__LINE__, __VA_ARGS__)
#define CASE_AT(line, ...) CASE_NUMBERED(line, __VA_ARGS__)
#define CASE_NUMBERED(number, ...)                                \
    void case_##number();                                         \
    const ::test::Case made_##number(case_##number, __VA_ARGS__); \
    void case_##number()

// The configuration of this process: the chip named by HOST_NPU_SOC, "cache off" without a cache of phase one, or
// "strict memory" if allocations are not padded.
std::string configuration();

// Whether the cache of phase one is enabled, the default.
bool cache_is_on();

}  // namespace test
