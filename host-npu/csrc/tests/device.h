// Tensors on the device and calls of operators, through the published interface only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "acl/acl.h"
#include "aclnn/acl_meta.h"
#include "tests/harness.h"

namespace test {

using Shape = std::vector<std::int64_t>;

std::int64_t numel(const Shape& shape);
std::size_t item_size(aclDataType dtype);

// Converts values to the bytes that the device stores, and back. 16-bit floats are rounded to nearest-even.
std::vector<std::uint8_t> encode(aclDataType dtype, const std::vector<double>& values);
std::vector<double> decode(aclDataType dtype, const std::vector<std::uint8_t>& bytes);
// Rounds `value` to another type.
double rounded(aclDataType dtype, double value);

// Device memory.
class Memory {
  public:
    explicit Memory(std::size_t bytes);
    Memory(Memory&& other) noexcept : address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}
    Memory& operator=(Memory&& other) noexcept {
        std::swap(address_, other.address_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Memory();

    void* address() const { return address_; }
    std::size_t bytes() const { return bytes_; }
    void upload(const std::vector<std::uint8_t>& from) const;
    std::vector<std::uint8_t> download() const;

  private:
    void* address_ = nullptr;
    std::size_t bytes_ = 0;
};

// The layout of a tensor in its storage; contiguous by default.
struct View {
    std::optional<Shape> strides = {};
    std::int64_t offset = 0;
    std::optional<Shape> storage = {};
    aclFormat format = ACL_FORMAT_ND;
};

// An aclTensor and its storage. A default-constructed one is a null pointer.
class Tensor {
  public:
    Tensor() = default;
    // `values` fill the storage; a single value is repeated.
    Tensor(aclDataType dtype, Shape shape, std::vector<double> values = {0}, View view = {});
    Tensor(Tensor&& other) noexcept { *this = std::move(other); }
    Tensor& operator=(Tensor&& other) noexcept;
    ~Tensor() { aclDestroyTensor(tensor_); }

    operator aclTensor*() const { return tensor_; }
    // Returns all values of the storage.
    std::vector<double> values() const;
    void set(const std::vector<double>& values) const;
    void* address() const { return memory_->address(); }
    const Memory& memory() const { return *memory_; }
    aclDataType dtype() const { return dtype_; }
    const Shape& shape() const { return shape_; }
    // Destroys the aclTensor, but not its storage.
    void destroy_handle();

  private:
    aclTensor* tensor_ = nullptr;
    aclDataType dtype_ = ACL_DT_UNDEFINED;
    Shape shape_;
    std::optional<Memory> memory_;
};

Tensor floats(Shape shape, std::vector<double> values = {0});

// An aclScalar of a double.
class Scalar {
  public:
    Scalar(double value) : handle_(aclCreateScalar(&value, ACL_DOUBLE), aclDestroyScalar) {}
    operator const aclScalar*() const { return handle_.get(); }

  private:
    std::shared_ptr<const aclScalar> handle_;
};

struct Stream {
    Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    ~Stream();
    // Synchronizes and returns the status, which reports device faults.
    aclError wait() const;

    aclrtStream handle = nullptr;
};

// Returns the message of aclGetRecentErrMsg, if any.
std::optional<std::string> recent_error();

// The result of a phase one.
struct Phase {
    aclnnStatus status = 0;
    std::uint64_t workspace_size = 0;
    aclOpExecutor* executor = nullptr;
};

// `call` has phase_one(uint64_t*, aclOpExecutor**) and phase_two(void*, uint64_t, aclOpExecutor*, aclrtStream).
template <class Call>
Phase phase_one(Call& call) {
    Phase phase;
    phase.status = call.phase_one(&phase.workspace_size, &phase.executor);
    return phase;
}

// Runs both phases, which must succeed, and returns the status of a synchronization.
template <class Call>
aclError launch(Call& call, const Phase& phase) {
    const Memory workspace(phase.workspace_size);
    const Stream stream;
    const auto status = call.phase_two(workspace.address(), phase.workspace_size, phase.executor, stream.handle);
    expect(status == 0, "phase two returned ", status, ": ", recent_error().value_or(""));
    return stream.wait();
}

template <class Call>
void run(Call& call) {
    const auto phase = phase_one(call);
    expect(phase.status == 0, "phase one returned ", phase.status, ": ", recent_error().value_or(""));
    const auto status = launch(call, phase);
    expect(status == 0, "the synchronisation returned ", status, ": ", recent_error().value_or(""));
}

// A modification of a valid call, and the expected result of phase one.
template <class Call>
struct Row {
    const char* name;
    std::function<void(Call&)> change;
    aclnnStatus status = 0;
};

// Checks that refused rows leave the caller's variables unchanged, and launches accepted ones.
template <class Call>
void check_rows(const std::vector<Row<Call>>& rows) {
    for (const auto& row : rows) {
        Call call;
        row.change(call);
        std::uint64_t size = 12345;
        auto* executor = reinterpret_cast<aclOpExecutor*>(&size);
        const auto status = call.phase_one(&size, &executor);
        const auto error = recent_error();
        expect(status == row.status, row.name, ": phase one returned ", status, " instead of ", row.status, ": ",
               error.value_or("no message"));
        if (row.status == 0) {
            expect(!error, row.name, ": success left a message: ", error.value_or(""));
            expect_equal(launch(call, {status, size, executor}), 0, row.name, ": the synchronisation's status");
            continue;
        }
        expect(error.has_value(), row.name, ": there is no message");
        expect(size == 12345, row.name, ": workspaceSize was written");
        expect(executor == reinterpret_cast<aclOpExecutor*>(&size), row.name, ": executor was written");
    }
    Call good;
    run(good);
}

}  // namespace test
