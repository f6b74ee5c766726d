// Initialization and finalization, process options, and CANN's version and attributes.
#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdarg>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <string_view>

#include "acl/acl.h"
#include "ascendcl/context.h"
#include "ascendcl/error.h"
#include "ascendcl/settings.h"

using namespace host_npu;

namespace {

// The simulated CANN release.
struct Version {
    int major;
    int minor;
    int release;
    std::string_view text;
};
constexpr Version kVersion{9, 1, 0, "9.1.0"};

std::atomic<int> initialisations{0};

bool messages_are_shared(const char* configuration_path) {
    std::ifstream file(configuration_path);
    if (!file) throw Error(ACL_ERROR_INVALID_FILE, std::string("cannot read ") + configuration_path);
    std::string text((std::istreambuf_iterator<char>(file)), {});
    std::erase_if(text, [](unsigned char character) { return std::isspace(character) != 0; });
    return text.find(R"("err_msg_mode":"1")") != std::string::npos;
}

const char* option_name(aclSysParamOpt option) {
    switch (option) {
        case ACL_OPT_DETERMINISTIC:
            return "ACL_OPT_DETERMINISTIC";
        case ACL_OPT_ENABLE_DEBUG_KERNEL:
            return "ACL_OPT_ENABLE_DEBUG_KERNEL";
        case ACL_OPT_STRONG_CONSISTENCY:
            return "ACL_OPT_STRONG_CONSISTENCY";
    }
    throw Error(ACL_ERROR_RT_PARAM_INVALID, "there is no system option " + std::to_string(option));
}

}  // namespace

aclError aclInit(const char* configPath) {
    return run_api(__func__, [&] {
        // Read the settings now, so that invalid ones raise here.
        soc();
        device_count();
        device_memory_bytes();
        if (configPath != nullptr && *configPath != '\0' && messages_are_shared(configPath)) {
            share_messages_between_threads();
        }
        if (initialisations++ > 0) throw Error(ACL_ERROR_REPEAT_INITIALIZE, "aclInit was called before");
    });
}

aclError aclFinalize() {
    return run_api(__func__, [] {
        if (initialisations.exchange(0) == 0) throw Error(ACL_ERROR_UNINITIALIZE, "aclInit was not called");
    });
}

const char* aclrtGetSocName() {
    try {
        throw_if_injected(__func__);
        return soc_name().c_str();
    } catch (const Error& error) {
        failed(__func__, error.status(), error.what());
        return nullptr;
    }
}

aclError aclGetCannAttributeList(const aclCannAttr** cannAttrList, size_t* num) {
    return run_api(__func__, [&] {
        require(cannAttrList, "cannAttrList");
        require(num, "num");
        static constexpr aclCannAttr newer[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
        static constexpr aclCannAttr older[] = {ACL_CANN_ATTR_JIT_COMPILE};
        const bool is_older = soc() == Soc::Ascend910 || soc() == Soc::Ascend310P;
        *cannAttrList = is_older ? older : newer;
        *num = is_older ? std::size(older) : std::size(newer);
    });
}

aclError aclGetCannAttribute(aclCannAttr cannAttr, int32_t* value) {
    return answer(__func__, value, "value", [&] {
        const aclCannAttr* attributes = nullptr;
        size_t count = 0;
        aclGetCannAttributeList(&attributes, &count);
        return std::find(attributes, attributes + count, cannAttr) != attributes + count;
    });
}

aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value) {
    return run_api(__func__, [&] {
        option_name(opt);
        set_process_option(opt, value);
    });
}

aclError aclrtGetSysParamOpt(aclSysParamOpt opt, int64_t* value) {
    return answer(__func__, value, "value", [&] {
        option_name(opt);
        return process_option(opt);
    });
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value) {
    return run_api(__func__, [&] {
        option_name(opt);
        current_context()->set_option(opt, value);
    });
}

aclError aclrtCtxGetSysParamOpt(aclSysParamOpt opt, int64_t* value) {
    return answer(__func__, value, "value", [&] {
        const char* const name = option_name(opt);
        const auto found = current_context()->option(opt);
        if (!found) throw Error(ACL_ERROR_RT_SYSPARAMOPT_NOT_SET, std::string(name) + " was not set");
        return *found;
    });
}

aclError aclsysGetVersionStr(char* pkgName, char* versionStr) {
    return run_api(__func__, [&] {
        require(pkgName, "pkgName");
        require(versionStr, "versionStr");
        kVersion.text.copy(versionStr, kVersion.text.size());
        versionStr[kVersion.text.size()] = '\0';
    });
}

aclError aclsysGetVersionNum(char* pkgName, int32_t* versionNum) {
    return run_api(__func__, [&] {
        require(pkgName, "pkgName");
        require(versionNum, "versionNum");
        *versionNum = (kVersion.major * 100 + kVersion.minor) * 100000 + kVersion.release * 1000;
    });
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
    return run_api(__func__, [&] {
        require(version, "version");
        *version = {};
        kVersion.text.copy(version->version, sizeof version->version - 1);
        std::to_string(kVersion.major).copy(version->majorVersion, sizeof version->majorVersion - 1);
        std::to_string(kVersion.minor).copy(version->minorVersion, sizeof version->minorVersion - 1);
        std::to_string(kVersion.release).copy(version->releaseVersion, sizeof version->releaseVersion - 1);
    });
}

aclError aclrtGetVersion(int32_t* majorVersion, int32_t* minorVersion, int32_t* patchVersion) {
    return run_api(__func__, [&] {
        require(majorVersion, "majorVersion");
        require(minorVersion, "minorVersion");
        require(patchVersion, "patchVersion");
        *majorVersion = ACL_MAJOR_VERSION;
        *minorVersion = ACL_MINOR_VERSION;
        *patchVersion = ACL_PATCH_VERSION;
    });
}

// CANN writes these to its log files. torch_npu also reports its errors elsewhere.
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

aclError aclmdlInitDump() { return unsupported(__func__, "dumping of operators"); }

aclError aclmdlSetDump(const char*) {
    // torch_npu ignores the status.
    std::cerr << "host NPU: nothing is dumped, because dumping of operators is not simulated\n";
    return unsupported(__func__, "dumping of operators");
}

aclError aclmdlFinalizeDump() { return unsupported(__func__, "dumping of operators"); }
