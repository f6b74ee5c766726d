// An operation of ATB as a formula over tensors.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "atb/abi.h"

namespace atb {

using Tensors = std::vector<at::Tensor>;

// A call in two parts. `check` validates shapes and the values of host tensors; device tensors are meta tensors.
// `compute` computes the outputs on the stream's thread.
struct Formula {
    std::function<void(const Tensors& inputs, const Tensors& outputs)> check;
    std::function<Tensors(const Tensors& inputs)> compute;
};

std::string not_simulated(const std::string& name);

template <class Condition>
void require_simulated(const Condition& condition, const std::string& name) {
    if (!condition) throw std::runtime_error(not_simulated(name));
}

// ATB supports only int32 for indices and lengths.
void require_int32(const char* name, const at::Tensor& tensor);
std::vector<std::int64_t> numbers(const at::Tensor& tensor);

// Returns the indices of the `k` largest numbers of each row; of equal numbers, the first ones.
at::Tensor largest_columns(const at::Tensor& x, std::int64_t k);
// Zeros all groups of columns except the `k` with the largest maximum, or sum of the largest elements.
at::Tensor of_largest_groups(const at::Tensor& x, const infer::GroupTopkParam& parameters);

Formula formula_of(const infer::SelfAttentionParam& parameters);

class Computed : public Operation {
  public:
    Computed(std::string name, Formula formula) : name_(std::move(name)), formula_(std::move(formula)) {}

    std::string GetName() const override { return name_; }
    Status InferShape(const SVector<TensorDesc>&, SVector<TensorDesc>&) const override;
    std::uint32_t GetInputNum() const override { return 0; }
    std::uint32_t GetOutputNum() const override { return 0; }
    Status Setup(const VariantPack& tensors, std::uint64_t& workspace_size, Context* context) override;
    Status Execute(const VariantPack& tensors, std::uint8_t* workspace, std::uint64_t workspace_size,
                   Context* context) override;

  private:
    std::string name_;
    Formula formula_;
};

}  // namespace atb
