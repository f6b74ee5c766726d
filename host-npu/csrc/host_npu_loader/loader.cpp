// Loads torch_npu's library with a CUDA build of torch. Both register allocator settings under the same keys in torch,
// which aborts the process when a key is registered twice.
#include <c10/core/AllocatorConfig.h>
#include <dlfcn.h>

#include <string>
#include <unordered_set>
#include <utility>

namespace {

// Hides the registered keys, and restores them on destruction.
class KeysAside {
  public:
    KeysAside() { std::swap(aside_, keys_); }
    ~KeysAside() { keys_.merge(aside_); }
    KeysAside(const KeysAside&) = delete;
    KeysAside& operator=(const KeysAside&) = delete;

  private:
    std::unordered_set<std::string>& keys_ = c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys();
    std::unordered_set<std::string> aside_;
};

}  // namespace

// Returns why the library cannot be loaded, or null.
extern "C" __attribute__((visibility("default"))) const char* host_npu_load_torch_npu(const char* path) {
    const KeysAside keys;
    return dlopen(path, RTLD_NOW) == nullptr ? dlerror() : nullptr;
}
