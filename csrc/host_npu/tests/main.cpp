// Runs the cases for this process's chip, all or those named on the command line.
#include <algorithm>
#include <cstdlib>
#include <iostream>

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

Case::Case(const char* the_name, std::function<void()> the_body, std::vector<std::string> the_socs)
    : name(the_name), body(std::move(the_body)), socs(std::move(the_socs)) {
    cases().push_back(*this);
}

std::string soc() {
    const char* const value = std::getenv("TORCH_ACLNN_HOST_NPU_SOC");
    return value == nullptr ? "Ascend910B" : value;
}

bool cache_is_on() {
    const char* const limit = std::getenv("ACLNN_CACHE_LIMIT");
    return std::getenv("DISABLE_L2_CACHE") == nullptr && (limit == nullptr || std::string(limit) != "0");
}

}  // namespace test

namespace {

// Prints and returns whether the case passed.
bool run(const test::Case& test) {
    try {
        test.body();
        std::cout << "ok " << test.name << std::endl;
        return true;
    } catch (const std::exception& error) {
        std::cout << "FAILED " << test.name << ": " << error.what() << std::endl;
    }
    // A later case starts without this one's error and device fault.
    aclGetRecentErrMsg();
    aclrtSynchronizeDevice();
    return false;
}

}  // namespace

int main(int argc, char** argv) {
    const std::vector<std::string> wanted(argv + 1, argv + argc);
    if (aclInit(nullptr) != ACL_SUCCESS || aclnnInit(nullptr) != 0 || aclrtSetDevice(0) != ACL_SUCCESS) {
        std::cout << "FAILED to start" << std::endl;
        return 2;
    }
    int failures = 0;
    for (const auto& test : test::cases()) {
        const bool named = wanted.empty() || std::find(wanted.begin(), wanted.end(), test.name) != wanted.end();
        const bool applies = std::find(test.socs.begin(), test.socs.end(), test::soc()) != test.socs.end();
        if (named && applies && !run(test)) ++failures;
    }
    aclnnFinalize();
    aclrtResetDevice(0);
    aclFinalize();
    return failures == 0 ? 0 : 1;
}
