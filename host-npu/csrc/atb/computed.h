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

// A call in two parts. The first checks shapes, and the values of tensors of the host; those of the device are meta
// tensors there. The second computes the outputs in the thread of the stream.
struct Formula {
    std::function<void(const Tensors& inputs, const Tensors& outputs)> check;
    std::function<Tensors(const Tensors& inputs)> compute;
};

std::string not_simulated(const std::string& name);

template <class Condition>
void require_simulated(const Condition& condition, const std::string& name) {
    if (!condition) throw std::runtime_error(not_simulated(name));
}

// ATB takes indices and lengths of int32 only.
void require_int32(const char* name, const at::Tensor& tensor);
std::vector<std::int64_t> numbers(const at::Tensor& tensor);

// The places of the `k` largest numbers of each row, of equal ones the first.
at::Tensor largest_columns(const at::Tensor& x, std::int64_t k);
// The groups of columns whose largest elements, or sums of these, are not among the `k` largest become 0.
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
