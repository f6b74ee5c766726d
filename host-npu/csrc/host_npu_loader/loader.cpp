// Loads torch_npu's library beside a CUDA build of torch. Both register the settings of their allocators in one set of
// keys of torch, several under the same key, and torch ends the process when it is given a key twice.
#include <c10/core/AllocatorConfig.h>
#include <dlfcn.h>

#include <string>
#include <unordered_set>
#include <utility>

namespace {

// For its lifetime no key is registered; those that were are registered again at its end.
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
