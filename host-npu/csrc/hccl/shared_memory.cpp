#include "hccl/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

#include "ascendcl/error.h"

namespace host_npu::hccl {
namespace {

constexpr char kName[] = "host_npu_hccl";

[[noreturn]] void throw_system_error(const char* call) {
    throw Error(ACL_ERROR_RT_DRV_INTERNAL_ERROR, std::string(call) + " failed: " + std::strerror(errno));
}

}  // namespace

File::~File() {
    if (descriptor_ >= 0) close(descriptor_);
}

File make_shared_file(std::size_t bytes) {
    File file(memfd_create(kName, MFD_CLOEXEC));
    if (file.descriptor() < 0) throw_system_error("memfd_create");
    resize(file, bytes);
    return file;
}

File open_file_of(std::int32_t process, int descriptor) {
    const auto path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
    // The descriptor may belong to another file by now.
    std::array<char, 64> target{};
    if (readlink(path.c_str(), target.data(), target.size() - 1) < 0) return File();
    if (!std::string_view(target.data()).starts_with(std::string("/memfd:") + kName)) return File();
    return File(open(path.c_str(), O_RDWR | O_CLOEXEC));
}

void resize(const File& file, std::size_t bytes) {
    if (ftruncate(file.descriptor(), static_cast<off_t>(bytes)) != 0) throw_system_error("ftruncate");
}

Mapping::Mapping(const File& file, std::size_t bytes) : start_(nullptr), bytes_(bytes), process_(getpid()) {
    void* const start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor(), 0);
    if (start == MAP_FAILED) throw_system_error("mmap of a communicator");
    madvise(start, bytes, MADV_DONTFORK);
    madvise(start, bytes, MADV_DONTDUMP);
    start_ = static_cast<std::byte*>(start);
}

Mapping::~Mapping() {
    // In a forked child, the addresses may be in use for something else.
    if (start_ != nullptr && process_ == getpid()) munmap(start_, bytes_);
}

}  // namespace host_npu::hccl
