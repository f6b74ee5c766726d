// Ranks in processes of their own: this program again, which finds in its environment what it is to do.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>

#include "tests/ranks.h"

extern char** environ;

namespace {

using namespace test;

constexpr auto kFloat = HCCL_DATA_TYPE_FP32;
constexpr const char* kRole = "HOST_NPU_TEST_ROLE";
constexpr const char* kRoot = "HOST_NPU_TEST_ROOT";

std::string hexadecimal(const HcclRootInfo& info) {
    constexpr char digits[] = "0123456789abcdef";
    std::string text;
    for (const unsigned char byte : info.internal) {
        text += digits[byte / 16];
        text += digits[byte % 16];
    }
    return text;
}

HcclRootInfo root_info_from(const std::string& text) {
    HcclRootInfo info{};
    for (std::size_t index = 0; index < sizeof info.internal && 2 * index + 1 < text.size(); ++index) {
        info.internal[index] = static_cast<char>(std::stoi(text.substr(2 * index, 2), nullptr, 16));
    }
    return info;
}

HcclComm join(const HcclRootInfo& info, std::uint32_t rank) {
    HcclComm comm = nullptr;
    const auto status = HcclCommInitRootInfo(2, &info, rank, &comm);
    expect(status == HCCL_SUCCESS, "rank ", rank, " got ", status, ": ", recent_error().value_or(""));
    return comm;
}

std::vector<double> sum_of(HcclComm comm, double value) {
    const Stream stream;
    const Buffers data(kFloat, {{value}});
    HcclAllReduce(data[0], data[0], 1, kFloat, HCCL_REDUCE_SUM, comm, stream.handle);
    const auto status = stream.wait();
    expect(status == 0, "status ", status, ": ", recent_error().value_or(""));
    return data.values(0);
}

// What a child does; its exit status is 0 if it went well.
void play(const std::string& role) {
    if (role == "makes a root info") {
        HcclRootInfo info;
        expect_equal(HcclGetRootInfo(&info), HCCL_SUCCESS, "the status");
        std::cout << hexadecimal(info) << std::flush;
        return;
    }
    auto* const comm = join(root_info_from(std::getenv(kRoot)), 1);
    if (role == "sums") {
        expect_close(sum_of(comm, 2), {3}, 0, "the sum in the child");
        HcclCommDestroy(comm);
    } else if (role == "waits") {
        pause();
    }
}

// Before main.
const struct Child {
    Child() {
        const char* const role = std::getenv(kRole);
        if (role == nullptr) return;
        int status = 1;
        try {
            aclInit(nullptr);
            aclrtSetDevice(0);
            play(role);
            status = 0;
        } catch (const std::exception& error) {
            std::cerr << error.what() << std::endl;
        }
        _exit(status);
    }
} child;

// A child that plays a role, whose end is waited for.
class Process {
  public:
    Process(const std::string& role, const HcclRootInfo& root) {
        expect_equal(pipe2(output_, O_CLOEXEC), 0, "pipe2");
        std::vector<std::string> variables = {std::string(kRole) + "=" + role,
                                              std::string(kRoot) + "=" + hexadecimal(root)};
        for (char** entry = environ; *entry != nullptr; ++entry) variables.emplace_back(*entry);
        std::vector<char*> environment;
        for (auto& variable : variables) environment.push_back(variable.data());
        environment.push_back(nullptr);
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, output_[1], STDOUT_FILENO);
        char name[] = "child";
        char* arguments[] = {name, nullptr};
        const auto program = std::filesystem::read_symlink("/proc/self/exe");  // qemu cannot start the link
        const auto status = posix_spawn(&id_, program.c_str(), &actions, nullptr, arguments, environment.data());
        posix_spawn_file_actions_destroy(&actions);
        close(output_[1]);
        expect_equal(status, 0, "posix_spawn");
    }
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;
    ~Process() {
        kill();
        wait();
        close(output_[0]);
    }

    void kill() const {
        if (!has_ended_) ::kill(id_, SIGKILL);
    }
    // The exit status, or minus the signal's number.
    int wait() {
        if (!has_ended_) {
            int status = 0;
            waitpid(id_, &status, 0);
            has_ended_ = true;
            result_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
        }
        return result_;
    }
    std::string output() const {
        std::string text;
        char bytes[4096];
        for (ssize_t size = 0; (size = read(output_[0], bytes, sizeof bytes)) > 0;) text.append(bytes, size);
        return text;
    }

  private:
    pid_t id_ = 0;
    int output_[2] = {};
    bool has_ended_ = false;
    int result_ = 0;
};

HcclRootInfo own_root() {
    HcclRootInfo info;
    expect_equal(HcclGetRootInfo(&info), HCCL_SUCCESS, "HcclGetRootInfo's status");
    return info;
}

const Case sums{"processes/sum", [] {
                    const auto root = own_root();
                    Process other("sums", root);
                    auto* const comm = join(root, 0);
                    expect_close(sum_of(comm, 1), {3}, 0, "the sum");
                    expect_equal(other.wait(), 0, "the child's exit status");
                    HcclCommDestroy(comm);
                }};

const Case killed{"processes/a_rank_that_is_killed", [] {
                      const auto root = own_root();
                      Process other("waits", root);
                      auto* const comm = join(root, 0);
                      const Stream stream;
                      const Buffers data(kFloat, 1, 8);
                      HcclAllReduce(data[0], data[0], 8, kFloat, HCCL_REDUCE_SUM, comm, stream.handle);
                      other.kill();
                      // Nobody has asked for the exit status of the child yet.
                      expect(stream.wait() != 0, "the call did not fail");
                      const auto message = recent_error().value_or("no message");
                      expect_contains(message, "rank 1 (process ");
                      expect_contains(message, "died: rank 0 waited for it in call 1, AllReduce(count=8, fp32, sum)");
                      expect_equal(other.wait(), -SIGKILL, "how the child ended");
                      HcclCommDestroy(comm);
                  }};

const Case dead_root{"processes/the_root_that_died", [] {
                         Process other("makes a root info", {});
                         const auto root = root_info_from(other.output());
                         expect_equal(other.wait(), 0, "the child's exit status");
                         HcclComm comm = nullptr;
                         expect_equal(HcclCommInitRootInfo(2, &root, 1, &comm), HCCL_E_TCP_CONNECT, "the status");
                         expect_contains(recent_error().value_or("no message"), "which made rootInfo, has ended");
                     }};

const Case missing{"processes/a_rank_that_never_comes", [] {
                       setenv("HCCL_CONNECT_TIMEOUT", "1", 1);
                       const auto root = own_root();
                       HcclComm comm = nullptr;
                       const auto status = HcclCommInitRootInfo(2, &root, 0, &comm);
                       unsetenv("HCCL_CONNECT_TIMEOUT");
                       expect_equal(status, HCCL_E_TIMEOUT, "the status");
                       expect_contains(recent_error().value_or("no message"),
                                       "rank 1 did not come within 1 s: rank 0 waited for it to make communicator ");
                   }};

const Case wrong_limit{"processes/a_limit_that_is_no_number", [] {
                           setenv("HCCL_EXEC_TIMEOUT", "soon", 1);
                           const auto root = own_root();
                           HcclComm comm = nullptr;
                           const auto status = HcclCommInitRootInfo(1, &root, 0, &comm);
                           unsetenv("HCCL_EXEC_TIMEOUT");
                           expect_equal(status, HCCL_E_PARA, "the status");
                           expect_contains(recent_error().value_or("no message"), "HCCL_EXEC_TIMEOUT must be");
                       }};

}  // namespace
