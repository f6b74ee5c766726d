// build.py collects the functions that the installed torch_npu looks up in opapi_functions.inc, one
// HOST_NPU_FUNCTION(name) per line. libopapi defines each as weak functions that jump through a pointer, initially to a
// refusal. Jumps leave the arguments, of unknown types, in place. GetMaxWorkspaceSize is phase one: no formula's
// workspace depends on values.
#include "opapi/answers.h"

#include <dlfcn.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "nnopbase/status.h"

namespace host_npu {
namespace {

// Whether a library has installed functions. python -m host_npu loads one; a linked program may not.
bool has_formulas = false;

aclnnStatus refuse(const char* name) {
    const auto text = std::string("the host NPU does not simulate ") + name +
                      (has_formulas ? "; python -m host_npu --list shows what is simulated"
                                    : " without libhost_npu_formulas.so, in which most operators are; link the program "
                                      "with it and with torch's libtorch_cpu.so");
    // A failure on the thread of torch_npu's queue would end the queue; the next call raises it instead.
    if (refuse_after_queue(text)) return kSuccess;
    report_error(kFindKernelError, text);
    return kFindKernelError;
}

// Refuses phase one, for which tests can inject another failure.
aclnnStatus refuse(const char* name, const char* phase_one) {
    return unless_it_fails(phase_one, [&] { return refuse(name); });
}

}  // namespace
}  // namespace host_npu

#if defined(__x86_64__)
#define HOST_NPU_JUMP(slot) "jmp *" slot "(%rip)\n"
#elif defined(__aarch64__)
#define HOST_NPU_JUMP(slot) "adrp x16, " slot "\n ldr x16, [x16, #:lo12:" slot "]\n br x16\n"
#endif

#define HOST_NPU_WEAK_FUNCTION(name, slot)                                                        \
    ".weak " name "\n.type " name ", @function\n" name ": .globl own_" name "\n.hidden own_" name \
    "\n"                                                                                          \
    "own_" name ": " HOST_NPU_JUMP(slot) ".size " name ", . - " name "\n"
#define HOST_NPU_WEAK_PHASE_ONE(name, size) HOST_NPU_WEAK_FUNCTION(name size, "one_of_" name)

#define HOST_NPU_FUNCTION(name)                                                                            \
    static aclnnStatus refuse_##name() { return host_npu::refuse(#name); }                                 \
    static aclnnStatus refuse_one_##name() { return host_npu::refuse(#name, #name "GetWorkspaceSize"); }   \
    extern "C" {                                                                                           \
    [[gnu::visibility("hidden")]] void own_##name();                                                       \
    [[gnu::visibility("hidden"), gnu::used]] host_npu::AnyFunction one_of_##name =                         \
        reinterpret_cast<host_npu::AnyFunction>(refuse_one_##name);                                        \
    [[gnu::visibility("hidden"), gnu::used]] host_npu::AnyFunction two_of_##name =                         \
        reinterpret_cast<host_npu::AnyFunction>(refuse_##name);                                            \
    }                                                                                                      \
    asm(".pushsection .text\n" HOST_NPU_WEAK_PHASE_ONE(#name, "GetWorkspaceSize") HOST_NPU_WEAK_PHASE_ONE( \
        #name, "GetMaxWorkspaceSize") HOST_NPU_WEAK_FUNCTION(#name, "two_of_" #name) ".popsection\n");
#include "opapi_functions.inc"
#undef HOST_NPU_FUNCTION

namespace host_npu {
namespace {

struct Function {
    std::string_view name;
    AnyFunction own;
    AnyFunction* phase_one;
    AnyFunction* phase_two;
    // Not an AnyFunction: the cast would make the table's initialization dynamic, which is slow to compile.
    aclnnStatus (*refusal)();
    bool has_rules = false;

    const char* how_answered() const {
        // Looked up by name, so that a library whose names were changed by a test can be loaded.
        if (reinterpret_cast<AnyFunction>(dlsym(RTLD_DEFAULT, name.data())) != own) return "checks";
        if (*phase_two == reinterpret_cast<AnyFunction>(refusal)) return "refused";
        return has_rules ? "rules" : "formula";
    }
};

constinit Function functions[] = {
#define HOST_NPU_FUNCTION(name) {#name, own_##name, &one_of_##name, &two_of_##name, refuse_##name},
#include "opapi_functions.inc"
#undef HOST_NPU_FUNCTION
};

}  // namespace

void answer(const char* name, AnyFunction phase_one, AnyFunction phase_two, bool has_rules) {
    has_formulas = true;
    auto* const found = std::ranges::find(functions, std::string_view(name), &Function::name);
    if (found == std::end(functions)) return;
    *found->phase_one = phase_one;
    *found->phase_two = phase_two;
    found->has_rules = has_rules;
}

}  // namespace host_npu

// Returns a line for each function that torch_npu looks up: its name and "checks", "rules", "formula" or "refused".
extern "C" HOST_NPU_EXPORT const char* host_npu_list() {
    static std::string lines;
    lines.clear();
    for (const auto& function : host_npu::functions) {
        lines.append(function.name).append(" ").append(function.how_answered()).append("\n");
    }
    return lines.c_str();
}
