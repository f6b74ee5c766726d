// Runs the fuzzer's target without libFuzzer, on the given files and on COUNT mutations of them, and prints the
// counters of the host NPU.
//
//     calls_fuzz COUNT FILE...
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" const char* host_npu_stats_json();
extern "C" int LLVMFuzzerInitialize(int*, char***);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes read(const char* path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) {
        std::cerr << "usage: calls_fuzz COUNT FILE..." << std::endl;
        return 2;
    }
    LLVMFuzzerInitialize(&argc, &argv);
    std::vector<Bytes> seeds;
    for (int index = 2; index < argc; ++index) seeds.push_back(read(argv[index]));
    for (const auto& seed : seeds) LLVMFuzzerTestOneInput(seed.data(), seed.size());
    // A fixed seed: the same inputs in every run.
    std::mt19937 random(0);
    const auto below = [&](std::size_t limit) { return random() % limit; };
    const auto count = std::strtoul(argv[1], nullptr, 10);
    for (unsigned long done = 0; done < count; ++done) {
        Bytes bytes = seeds[below(seeds.size())];
        for (auto changes = below(4) + 1; changes > 0; --changes) {
            const auto at = bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size()));
            switch (below(4)) {
                case 0:
                    bytes.insert(at, static_cast<std::uint8_t>(random()));
                    break;
                case 1:
                    if (bytes.size() > 1) bytes.erase(at);
                    break;
                default:
                    *at = static_cast<std::uint8_t>(random());
            }
        }
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    std::cout << host_npu_stats_json() << std::endl;
    return 0;
}
