// The descriptions of graph operators (aclop), which torch_npu builds before the host NPU runs or refuses the operator.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "acl/acl.h"
#include "ascendcl/error.h"
#include "ascendcl/operator_objects.h"

using namespace host_npu;

namespace {

thread_local std::array<const aclTensorDesc*, 2> described{};

// Creates a counted object, or returns null if a test injected a failure.
template <typename Object, typename... Members>
Object* create(const char* function, const char* kind, Members&&... members) {
    if (injected_failure(function)) return nullptr;
    count_alive(kind, 1);
    return new Object{std::forward<Members>(members)...};
}

template <typename Object>
void destroy(const char* kind, const Object* object) {
    if (object == nullptr) return;
    count_alive(kind, -1);
    delete object;
}

std::int32_t set_attribute(const char* function, aclopAttr* attr, const char* name, aclopAttr::Value value = {}) {
    return run_api(function, [&] {
        require(attr, "attr");
        require(name, "attrName");
        attr->values.insert_or_assign(name, std::move(value));
    });
}

template <typename Number>
std::int32_t set_list(const char* function, aclopAttr* attr, const char* name, int count, const Number* values) {
    return run_api(function, [&] {
        require(attr, "attr");
        require(name, "attrName");
        require(count == 0 || (count > 0 && values != nullptr), "numValues and values do not fit each other");
        attr->values.insert_or_assign(name, std::vector<Number>(values, values + count));
    });
}

}  // namespace

std::array<const aclTensorDesc*, 2> host_npu::take_described() { return std::exchange(described, {}); }

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) {
    return create<aclDataBuffer>(__func__, "aclDataBuffer", data, size);
}

aclError aclDestroyDataBuffer(const aclDataBuffer* dataBuffer) {
    return run_api(__func__, [&] {
        require(dataBuffer, "dataBuffer");
        destroy("aclDataBuffer", dataBuffer);
    });
}

void* aclGetDataBufferAddr(const aclDataBuffer* dataBuffer) {
    return dataBuffer == nullptr ? nullptr : dataBuffer->data;
}

size_t aclGetDataBufferSizeV2(const aclDataBuffer* dataBuffer) { return dataBuffer == nullptr ? 0 : dataBuffer->size; }

aclTensorDesc* aclCreateTensorDesc(aclDataType dataType, int numDims, const int64_t* dims, aclFormat format) {
    if (numDims < 0 || (numDims > 0 && dims == nullptr)) {
        failed(__func__, ACL_ERROR_INVALID_PARAM, "numDims and dims do not fit each other");
        return nullptr;
    }
    const std::vector<std::int64_t> all(dims, dims + numDims);
    auto* const desc =
        create<aclTensorDesc>(__func__, "aclTensorDesc", dataType, all, format, std::string(), format, all);
    described = {described[1], desc};
    return desc;
}

void aclDestroyTensorDesc(const aclTensorDesc* desc) { destroy("aclTensorDesc", desc); }

aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc == nullptr ? ACL_DT_UNDEFINED : desc->type; }

aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) {
    return desc == nullptr ? ACL_FORMAT_UNDEFINED : desc->format;
}

size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc == nullptr ? 0 : desc->dims.size(); }

aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* dimSize) {
    return run_api(__func__, [&] {
        require(desc, "desc");
        require(dimSize, "dimSize");
        require(index < desc->dims.size(), "index is not below the number of dimensions");
        *dimSize = desc->dims[index];
    });
}

void aclSetTensorDescName(aclTensorDesc* desc, const char* name) {
    if (desc != nullptr && name != nullptr) desc->name = name;
}

aclError aclSetTensorFormat(aclTensorDesc* desc, aclFormat format) {
    return run_api(__func__, [&] {
        require(desc, "desc");
        desc->storage_format = format;
    });
}

aclError aclSetTensorShape(aclTensorDesc* desc, int numDims, const int64_t* dims) {
    return run_api(__func__, [&] {
        require(desc, "desc");
        require(numDims == 0 || (numDims > 0 && dims != nullptr), "numDims and dims do not fit each other");
        desc->storage_dims.assign(dims, dims + numDims);
    });
}

aclError aclSetTensorPlaceMent(aclTensorDesc* desc, aclMemType memType) {
    return run_api(__func__, [&] {
        require(desc, "desc");
        desc->is_on_host = memType != ACL_MEMTYPE_DEVICE;
    });
}

aclopAttr* aclopCreateAttr() { return create<aclopAttr>(__func__, "aclopAttr"); }

void aclopDestroyAttr(const aclopAttr* attr) { destroy("aclopAttr", attr); }

aclError aclopSetAttrBool(aclopAttr* attr, const char* attrName, uint8_t attrValue) {
    return set_attribute(__func__, attr, attrName, std::int64_t{attrValue});
}

aclError aclopSetAttrInt(aclopAttr* attr, const char* attrName, int64_t attrValue) {
    return set_attribute(__func__, attr, attrName, attrValue);
}

aclError aclopSetAttrFloat(aclopAttr* attr, const char* attrName, float attrValue) {
    return set_attribute(__func__, attr, attrName, attrValue);
}

aclError aclopSetAttrString(aclopAttr* attr, const char* attrName, const char* attrValue) {
    return set_attribute(__func__, attr, attrName, std::string(attrValue == nullptr ? "" : attrValue));
}

aclError aclopSetAttrDataType(aclopAttr* attr, const char* attrName, aclDataType attrValue) {
    return set_attribute(__func__, attr, attrName, std::int64_t{attrValue});
}

aclError aclopSetAttrListBool(aclopAttr* attr, const char* attrName, int, const uint8_t*) {
    return set_attribute(__func__, attr, attrName);
}

aclError aclopSetAttrListInt(aclopAttr* attr, const char* attrName, int numValues, const int64_t* values) {
    return set_list(__func__, attr, attrName, numValues, values);
}

aclError aclopSetAttrListFloat(aclopAttr* attr, const char* attrName, int numValues, const float* values) {
    return set_list(__func__, attr, attrName, numValues, values);
}

aclError aclopSetAttrListListInt(aclopAttr* attr, const char* attrName, int, const int*, const int64_t* const[]) {
    return set_attribute(__func__, attr, attrName);
}
