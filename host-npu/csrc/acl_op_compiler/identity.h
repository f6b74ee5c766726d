// The graph operator Identity, with which torch_npu casts between formats.
#pragma once

#include <optional>
#include <string>

#include "ascendcl/operator_objects.h"

namespace host_npu {

// Puts the copy on the stream; returns why it cannot be done, if so.
std::optional<std::string> copy_identity(const aclTensorDesc& from, const aclDataBuffer& source,
                                         const aclTensorDesc& to, const aclDataBuffer& destination, aclrtStream stream);

}  // namespace host_npu
