// libacl_op_compiler: options of the graph compiler, and graph operators (aclop).
#include "acl/acl_op_compiler.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "acl_op_compiler/graph_operators.h"
#include "ascendcl/device.h"

namespace {

// The default of ACL_OP_JIT_COMPILE: on older architectures, CANN compiles graph operators at the call. torch_npu reads
// it, and then calls graph operators instead of aclnn functions.
bool compiles_at_calls_by_default() {
    return host_npu::soc() == host_npu::Soc::Ascend910 || host_npu::soc() == host_npu::Soc::Ascend310P;
}

struct Options {
    std::mutex mutex;
    std::map<aclCompileOpt, std::string> values{
        {ACL_OP_JIT_COMPILE, compiles_at_calls_by_default() ? "enable" : "disable"}};
};

Options& options() {
    static auto& all = *new Options;
    return all;
}

// Whether jit_compile was ever True. torch_npu continues to call some graph operators once it is False again. Most are
// simulated; the others are refused when they leave the queue.
std::atomic<bool> has_compiled_at_calls = false;

aclError refuse(aclError status, const std::string& text) {
    host_npu::report_error(status, text);
    return status;
}

// Runs the body of an exported function, or returns the failure that a test injected into this call.
template <typename Body>
aclError unless_it_fails(const std::string& function, const Body& body) {
    if (const auto failure = host_npu::injected_failure(function.c_str())) {
        return refuse(failure->first, function + ": " + failure->second);
    }
    return body();
}

// Returns the refusal, with advice that depends on jit_compile: with True, torch_npu calls more graph operators.
std::string no_graph_operator(const std::optional<std::string>& name) {
    auto& all = options();
    const std::lock_guard lock(all.mutex);
    const auto refused = "the host NPU does not simulate the graph operator (aclop) of " + name.value_or("this call");
    if (all.values[ACL_OP_JIT_COMPILE] == "enable") {
        return refused + "; after torch.npu.set_compile_mode(jit_compile=False), torch_npu calls fewer of them";
    }
    if (!name) {
        return refused + "; after torch.npu.set_compile_mode(jit_compile=True), the next synchronization names it";
    }
    return refused + "; the end of python -m host_npu --list says which are simulated";
}

// torch_npu sets ACL_OP_JIT_COMPILE on the caller's thread after it has described a graph operator and before it queues
// it. A refusal in the queue would end the queue. The operator's name is not known here, but only Identity casts to or
// from a private format.
bool is_about_to_queue_graph_operator() {
    const auto [from, to] = host_npu::take_described();
    if (to == nullptr) return false;
    const bool is_cast = from != nullptr && from->type == to->type && from->dims == to->dims &&
                         (host_npu::is_private(from->storage_format) || host_npu::is_private(to->storage_format));
    return !is_cast;
}

// Returns the name of the operator that the calling thread is in: torch_npu's, or PyTorch's copy_, which calls others.
// Returns nullopt if none is found.
std::optional<std::string> operator_on_stack() {
    std::array<void*, 64> frames{};
    const auto count = backtrace(frames.data(), static_cast<int>(frames.size()));
    std::optional<std::string> found;
    for (const auto* const frame : std::span(frames).first(static_cast<std::size_t>(count))) {
        Dl_info symbol{};
        if (dladdr(frame, &symbol) == 0 || symbol.dli_sname == nullptr) continue;
        const std::unique_ptr<char, decltype(&std::free)> text(
            abi::__cxa_demangle(symbol.dli_sname, nullptr, nullptr, nullptr), &std::free);
        const std::string_view name = text ? text.get() : "";
        if (name.starts_with("at::_ops::copy_::")) return "copy_";
        for (const std::string_view scope : {"at_npu::redispatch::", "at_npu::native::custom_ops::", "acl_op::"}) {
            if (found || !name.starts_with(scope)) continue;
            found = name.substr(scope.size(), name.find('(') - scope.size());
        }
    }
    return found;
}

// Whether the operator is not refused. With allow_internal_format=False, the result of npu_format_cast is in a base
// format and copied by Identity. Copies between devices use graph operators that are simulated.
bool goes_on(const std::optional<std::string>& name) {
    return name && (*name == "copy_" || name->find("npu_format_cast") != std::string::npos);
}

thread_local bool is_in_simulated_function = false;

std::map<std::string, host_npu::GraphOperator>& simulated() {
    static auto& all = *new std::map<std::string, host_npu::GraphOperator>{{"Identity", host_npu::run_identity}};
    return all;
}

std::vector<host_npu::GraphTensor> copies(int count, const aclTensorDesc* const desc[],
                                          const aclDataBuffer* const memory[]) {
    std::vector<host_npu::GraphTensor> all;
    for (int index = 0; index < count; ++index) all.push_back({*desc[index], *memory[index]});
    return all;
}

// A failure would end torch_npu's queue.
aclError refuse_in_queue(const std::string& text) {
    return host_npu::refuse_after_queue(text) ? ACL_SUCCESS : refuse(ACL_ERROR_OP_NOT_FOUND, text);
}

aclError run_operator(const char* type, int inputs, const aclTensorDesc* const input[],
                      const aclDataBuffer* const source[], int outputs, const aclTensorDesc* const output[],
                      const aclDataBuffer* const destination[], const aclopAttr* attributes, aclrtStream stream) {
    const std::string name = type == nullptr ? "operator" : type;
    const auto found = simulated().find(name);
    if (found == simulated().end()) return refuse_in_queue(no_graph_operator(name));
    const auto reason = found->second({name, copies(inputs, input, source), copies(outputs, output, destination),
                                       attributes == nullptr ? aclopAttr() : *attributes, stream});
    return reason ? refuse_in_queue(name + ": " + *reason) : ACL_SUCCESS;
}

}  // namespace

void host_npu::simulate_graph_operator(const char* name, GraphOperator run) { simulated()[name] = run; }

host_npu::InSimulatedFunction::InSimulatedFunction() { is_in_simulated_function = true; }
host_npu::InSimulatedFunction::~InSimulatedFunction() { is_in_simulated_function = false; }

// Returns the names of the simulated graph operators, one per line.
extern "C" HOST_NPU_EXPORT const char* host_npu_list_graph_operators() {
    static std::string names;
    names.clear();
    for (const auto& [name, run] : simulated()) names += name + "\n";
    return names.c_str();
}

aclError aclopCompileAndExecute(const char* opType, int numInputs, const aclTensorDesc* const inputDesc[],
                                const aclDataBuffer* const inputs[], int numOutputs,
                                const aclTensorDesc* const outputDesc[], aclDataBuffer* const outputs[],
                                const aclopAttr* attr, aclopEngineType, aclopCompileType, const char*,
                                aclrtStream stream) {
    return unless_it_fails(__func__, [&] {
        return run_operator(opType, numInputs, inputDesc, inputs, numOutputs, outputDesc, outputs, attr, stream);
    });
}

aclError aclopCompileAndExecuteV2(const char* opType, int numInputs, aclTensorDesc* inputDesc[],
                                  aclDataBuffer* inputs[], int numOutputs, aclTensorDesc* outputDesc[],
                                  aclDataBuffer* outputs[], aclopAttr* attr, aclopEngineType, aclopCompileType,
                                  const char*, aclrtStream stream) {
    return unless_it_fails(__func__, [&] {
        return run_operator(opType, numInputs, inputDesc, inputs, numOutputs, outputDesc, outputs, attr, stream);
    });
}

aclError aclSetCompileopt(aclCompileOpt opt, const char* value) {
    return unless_it_fails(__func__, [&] {
        if (value == nullptr) return refuse(ACL_ERROR_INVALID_PARAM, "aclSetCompileopt: value is null");
        if (opt == ACL_OP_JIT_COMPILE) {
            if (value != std::string("disable")) has_compiled_at_calls = true;
            if (is_about_to_queue_graph_operator() && !has_compiled_at_calls && !is_in_simulated_function) {
                const auto name = operator_on_stack();
                if (!goes_on(name)) return refuse(ACL_ERROR_OP_NOT_FOUND, no_graph_operator(name));
            }
        }
        auto& all = options();
        const std::lock_guard lock(all.mutex);
        all.values[opt] = value;
        return ACL_SUCCESS;
    });
}

size_t aclGetCompileoptSize(aclCompileOpt opt) {
    auto& all = options();
    const std::lock_guard lock(all.mutex);
    // Includes the terminating null character.
    return all.values[opt].size() + 1;
}

aclError aclGetCompileopt(aclCompileOpt opt, char* value, size_t length) {
    return unless_it_fails(__func__, [&] {
        auto& all = options();
        const std::lock_guard lock(all.mutex);
        const auto& text = all.values[opt];
        if (value == nullptr || length < text.size() + 1) {
            return refuse(ACL_ERROR_INVALID_PARAM, "aclGetCompileopt: value has no room for the option");
        }
        std::memcpy(value, text.c_str(), text.size() + 1);
        return ACL_SUCCESS;
    });
}
