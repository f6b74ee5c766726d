// Runs the cases for this process's configuration, all or those given on the command line. `--threads COUNT` runs them
// on each of COUNT threads concurrently, on the same devices.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "acl/acl.h"
#include "aclnn/aclnn_base.h"
#include "tests/harness.h"

namespace test {
namespace {

std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

}  // namespace

Case::Case(std::function<void()> the_body, const char* the_name, std::vector<std::string> the_configurations)
    : body(std::move(the_body)), name(the_name), configurations(std::move(the_configurations)) {
    cases().push_back(*this);
}

std::string configuration() {
    const char* const strict = std::getenv("HOST_NPU_STRICT_MEMORY");
    if (strict != nullptr && strict == std::string("1")) return "strict memory";
    if (!cache_is_on()) return "cache off";
    const char* const soc = std::getenv("HOST_NPU_SOC");
    return soc == nullptr ? "Ascend910B" : soc;
}

bool cache_is_on() {
    const char* const limit = std::getenv("ACLNN_CACHE_LIMIT");
    return std::getenv("DISABLE_L2_CACHE") == nullptr && (limit == nullptr || std::string(limit) != "0");
}

}  // namespace test

namespace {

// Runs a case, prints its result and returns whether it passed.
bool run(const std::string& name, const std::function<void()>& body) {
    const auto say = [](const std::string& line) { std::cout << line + "\n" << std::flush; };
    try {
        body();
        say("ok " + name);
        return true;
    } catch (const std::exception& error) {
        say("FAILED " + name + ": " + error.what());
    }
    // Clear the error and the device fault before the next case.
    aclGetRecentErrMsg();
    aclrtSynchronizeDevice();
    return false;
}

// The counters of the simulation, the only function outside the published interface.
extern "C" const char* host_npu_stats_json();

void expect_nothing_alive() {
    const std::string stats = host_npu_stats_json();
    for (const std::string kind : {"aclTensor", "aclOpExecutor", "aclScalar", "aclIntArray", "aclTensorList"}) {
        const auto key = '"' + kind + "\": ";
        const auto at = stats.find(key);
        if (at == std::string::npos) continue;
        const auto alive = std::strtoll(stats.c_str() + at + key.size(), nullptr, 10);
        test::expect_equal(alive, 0, "the number of ", kind);
    }
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> wanted(argv + 1, argv + argc);
    std::size_t threads = 1;
    if (wanted.size() > 1 && wanted[0] == "--threads") {
        threads = std::strtoull(wanted[1].c_str(), nullptr, 10);
        wanted.erase(wanted.begin(), wanted.begin() + 2);
    }
    std::uint32_t devices = 0;
    if (aclInit(nullptr) != ACL_SUCCESS || aclnnInit(nullptr) != 0 || aclrtGetDeviceCount(&devices) != ACL_SUCCESS) {
        std::cout << "FAILED to start" << std::endl;
        return 2;
    }
    std::vector<test::Case> chosen;
    for (const auto& test : test::cases()) {
        const bool named = wanted.empty() || std::find(wanted.begin(), wanted.end(), test.name) != wanted.end();
        const bool applies = std::find(test.configurations.begin(), test.configurations.end(), test::configuration()) !=
                             test.configurations.end();
        if (named && applies) chosen.push_back(test);
    }
    std::atomic<int> failures = 0;
    const auto work = [&](std::size_t number) {
        aclrtSetDevice(static_cast<std::int32_t>(number % devices));
        // Each thread starts with another case.
        for (std::size_t done = 0; done < chosen.size(); ++done) {
            const auto& test = chosen[(done + number * chosen.size() / threads) % chosen.size()];
            if (!run(test.name, test.body)) ++failures;
        }
    };
    std::vector<std::thread> others;
    for (std::size_t number = 1; number < threads; ++number) others.emplace_back(work, number);
    work(0);
    for (auto& other : others) other.join();
    if ((wanted.empty() || threads > 1) && !run("nothing_is_alive_at_the_end", expect_nothing_alive)) ++failures;
    aclnnFinalize();
    for (std::uint32_t device = 0; device < devices; ++device) aclrtResetDevice(static_cast<std::int32_t>(device));
    aclFinalize();
    return failures == 0 ? 0 : 1;
}
