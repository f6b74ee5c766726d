#include "ascendcl/memory_fault.h"

#include <unistd.h>

#include <csignal>
#include <string_view>

namespace host_npu {
namespace {

std::uintptr_t device_start = 0;
std::uintptr_t alias_start = 0;
std::size_t range_size = 0;
struct sigaction previous_action{};

void say(std::string_view text) {
    [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
}

void on_fault(int signal, siginfo_t* info, void* /*context*/) {
    const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    if (address - device_start < range_size) {
        say("host NPU: the host touched device memory, which only copies and kernels may access\n");
    } else if (address - alias_start < range_size) {
        say("host NPU: a kernel or a copy touched device memory that is not allocated\n");
    }
    // The faulting instruction is retried, and then runs the previously installed handler.
    sigaction(signal, &previous_action, nullptr);
}

}  // namespace

void explain_memory_faults(std::uintptr_t device, std::uintptr_t alias, std::size_t size) {
    device_start = device;
    alias_start = alias;
    range_size = size;
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &previous_action);
}

}  // namespace host_npu
