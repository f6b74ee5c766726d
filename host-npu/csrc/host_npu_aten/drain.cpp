#include "host_npu_aten/drain.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace host_npu {

void drain(c10::Device device) {
    const auto* const guard = c10::impl::getDeviceGuardImpl(device.type());
    guard->synchronizeStream(guard->getStream(device));
}

}  // namespace host_npu
