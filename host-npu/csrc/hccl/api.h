// Code shared by the exported functions.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "ascendcl/error.h"
#include "hccl/communicator.h"

// Missing in the headers of torch_npu 2.9.
extern "C" {
HcclResult HcclGetRootInfoScalable(HcclRootInfo* rootInfo);
HcclResult HcclCommInitRootInfoScalable(uint32_t nRanks, uint32_t nRoot, const HcclRootInfo* rootInfoList,
                                        uint32_t rank, uint32_t nExtRoot, const HcclCommConfig* config, HcclComm* comm);
}

namespace host_npu::hccl {

// HCCL's limit.
constexpr std::uint64_t kMostElements = 0x7FFFFFFFF;

// A refused call, with its HCCL status.
class Refusal : public std::runtime_error {
  public:
    Refusal(HcclResult result, const std::string& text) : std::runtime_error(text), result_(result) {}
    HcclResult result() const noexcept { return result_; }

  private:
    HcclResult result_;
};

HcclResult failed(const char* function, HcclResult result, const std::string& text) noexcept;

// Runs the body of an exported function and converts its exceptions to a status. If a test injected a failure into this
// call, returns that instead.
template <typename Body>
HcclResult run_api(const char* function, Body&& body) noexcept {
    try {
        if (const auto failure = injected_failure(function)) {
            return failed(function, static_cast<HcclResult>(failure->first), failure->second);
        }
        std::forward<Body>(body)();
        return HCCL_SUCCESS;
    } catch (const Refusal& refusal) {
        return failed(function, refusal.result(), refusal.what());
    } catch (const Error& error) {
        return failed(function, HCCL_E_RUNTIME, error.what());
    } catch (const std::bad_alloc&) {
        return failed(function, HCCL_E_MEMORY, "the host is out of memory");
    } catch (const std::exception& error) {
        return failed(function, HCCL_E_INTERNAL, error.what());
    }
}

// The result of a function that is not simulated.
inline HcclResult unsupported(const char* function, const std::string& what) noexcept {
    return run_api(function, [&] { throw Refusal(HCCL_E_NOT_SUPPORT, "the host NPU does not simulate " + what); });
}

inline void require(bool condition, const std::string& text, HcclResult result = HCCL_E_PARA) {
    if (!condition) throw Refusal(result, text);
}

inline void require(const void* pointer, const char* argument) {
    require(pointer != nullptr, std::string(argument) + " is null", HCCL_E_PTR);
}

// Runs the body of an exported function and stores its result in `out`.
template <typename Value, typename Body>
HcclResult answer(const char* function, Value* out, const char* argument, const Body& body) noexcept {
    return run_api(function, [&] {
        require(out, argument);
        *out = body();
    });
}

// The communicator of a handle, which this process must have created.
std::shared_ptr<Communicator> communicator_of(HcclComm handle);

// Refuses a call on a failed communicator.
void require_intact(const Communicator& communicator);

}  // namespace host_npu::hccl
