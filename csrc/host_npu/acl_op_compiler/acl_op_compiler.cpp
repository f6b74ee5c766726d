// libacl_op_compiler: options of the graph compiler, and its operators, which the host NPU does not have.
#include "acl/acl_op_compiler.h"

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "ascendcl/device.h"

namespace {

struct Options {
    std::mutex mutex;
    std::map<aclCompileOpt, std::string> values;
};

Options& options() {
    static auto& all = *new Options;
    return all;
}

aclError refuse(aclError status, const std::string& text) {
    host_npu::report_error(status, text);
    return status;
}

aclError refuse_operator(const char* type) {
    return refuse(ACL_ERROR_OP_NOT_FOUND, std::string("the host NPU has no graph operators (aclop), and so no ") +
                                              (type == nullptr ? "operator" : type));
}

}  // namespace

aclError aclopCompileAndExecute(const char* opType, int, const aclTensorDesc* const[], const aclDataBuffer* const[],
                                int, const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*,
                                aclopEngineType, aclopCompileType, const char*, aclrtStream) {
    return refuse_operator(opType);
}

aclError aclopCompileAndExecuteV2(const char* opType, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                  aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                  aclrtStream) {
    return refuse_operator(opType);
}

aclError aclSetCompileopt(aclCompileOpt opt, const char* value) {
    if (value == nullptr) return refuse(ACL_ERROR_INVALID_PARAM, "aclSetCompileopt: value is null");
    auto& all = options();
    const std::lock_guard lock(all.mutex);
    all.values[opt] = value;
    return ACL_SUCCESS;
}

size_t aclGetCompileoptSize(aclCompileOpt opt) {
    auto& all = options();
    const std::lock_guard lock(all.mutex);
    // With the terminating zero.
    return all.values[opt].size() + 1;
}

aclError aclGetCompileopt(aclCompileOpt opt, char* value, size_t length) {
    auto& all = options();
    const std::lock_guard lock(all.mutex);
    const auto& text = all.values[opt];
    if (value == nullptr || length < text.size() + 1) {
        return refuse(ACL_ERROR_INVALID_PARAM, "aclGetCompileopt: value has no room for the option");
    }
    std::memcpy(value, text.c_str(), text.size() + 1);
    return ACL_SUCCESS;
}
