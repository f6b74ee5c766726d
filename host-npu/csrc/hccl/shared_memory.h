// Anonymous shared memory, which is freed when the last process unmaps it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace host_npu::hccl {

// An owned file descriptor, or -1.
class File {
  public:
    explicit File(int descriptor = -1) : descriptor_(descriptor) {}
    File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
    File& operator=(File&& other) noexcept {
        std::swap(descriptor_, other.descriptor_);
        return *this;
    }
    ~File();

    int descriptor() const { return descriptor_; }

  private:
    int descriptor_;
};

// Creates a shared file. Throws Error if the system cannot.
File make_shared_file(std::size_t bytes);

// Opens a file of another process; returns an invalid File if the process or its file is gone.
File open_file_of(std::int32_t process, int descriptor);

void resize(const File& file, std::size_t bytes);

// A mapping of a shared file, which forked children do not inherit.
class Mapping {
  public:
    Mapping(const File& file, std::size_t bytes);
    Mapping(Mapping&& other) noexcept
        : start_(std::exchange(other.start_, nullptr)), bytes_(other.bytes_), process_(other.process_) {}
    Mapping& operator=(Mapping&&) = delete;
    ~Mapping();

    std::byte* start() const { return start_; }

  private:
    std::byte* start_;
    std::size_t bytes_;
    int process_;
};

}  // namespace host_npu::hccl
