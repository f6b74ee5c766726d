// Graph operators (aclop) as functions of a running call, which run<> enqueues.
#pragma once

#include <c10/core/InferenceMode.h>

#include <stdexcept>

#include "acl_op_compiler/graph_operators.h"
#include "host_npu_formulas/formula.h"
#include "host_npu_formulas/scalar_type.h"
#include "opapi/chip.h"

namespace host_npu::graph {

inline std::optional<at::ScalarType> dtype_of(const GraphTensor& tensor) { return named_type(tensor.desc.type); }

// The inputs, the output and the attributes of a running call.
class RunningOperator {
  public:
    RunningOperator(const GraphCall& call, const std::vector<Tensor>& on_host) : call_(call), on_host_(on_host) {}

    Tensor input(std::size_t index) const {
        return on_host_[index].defined() ? on_host_[index] : in_memory(call_.inputs[index]);
    }
    Tensor floats(std::size_t index) const { return widened(input(index)); }
    Tensor scalar(std::size_t index) const { return floats(index).reshape({}); }
    bool has_input(std::size_t index) const { return call_.inputs[index].desc.type != ACL_DT_UNDEFINED; }
    // The whole memory of an input, which the operator describes by shape only.
    Tensor all_memory(std::size_t index) const { return whole(call_.inputs[index]); }
    at::IntArrayRef sizes_of_output() const { return call_.outputs[0].desc.dims; }
    void set_output(const Tensor& result, std::size_t index = 0) const {
        const auto& output = call_.outputs[index];
        if (!is_private(output.desc.storage_format)) {
            in_memory(output).copy_(result);
            return;
        }
        const auto rows = result.to(*dtype_of(output)).contiguous();
        copy_elements(in_rows(output.desc), rows.const_data_ptr(), output.desc,
                      host_alias(output.memory.data, output.memory.size));
    }
    Tensor all_memory_of_output() const { return whole(call_.outputs[0]); }

    std::vector<std::int64_t> integers(std::size_t index) const {
        const auto values = input(index).to(at::kLong).contiguous();
        return {values.const_data_ptr<std::int64_t>(), values.const_data_ptr<std::int64_t>() + values.numel()};
    }
    std::int64_t integer(std::size_t index) const { return integers(index).at(0); }

    std::int64_t integer_attribute(const char* name) const { return attribute<std::int64_t>(name); }
    bool is_set(const char* name) const {
        return call_.attributes.values.contains(name) && attribute<std::int64_t>(name) != 0;
    }
    std::string text_attribute(const char* name) const { return attribute<std::string>(name); }
    float float_attribute(const char* name) const { return attribute<float>(name); }
    std::vector<std::int64_t> list_attribute(const char* name) const {
        return attribute<std::vector<std::int64_t>>(name);
    }
    std::vector<float> floats_attribute(const char* name) const { return attribute<std::vector<float>>(name); }

    std::int64_t reduction() const {
        const auto name = text_attribute("reduction");
        if (name == "none") return at::Reduction::None;
        TORCH_CHECK(name == "mean" || name == "sum", "its attribute reduction must be none, mean or sum, but it is ",
                    name);
        return name == "mean" ? at::Reduction::Mean : at::Reduction::Sum;
    }

  private:
    template <class Value>
    Value attribute(const char* name) const {
        const auto found = call_.attributes.values.find(name);
        TORCH_CHECK(found != call_.attributes.values.end(), "it must have an attribute ", name);
        const auto* const value = std::get_if<Value>(&found->second);
        TORCH_CHECK(value != nullptr, "its attribute ", name, " has another type than the operator's");
        return *value;
    }

    static aclTensorDesc in_rows(const aclTensorDesc& desc) {
        return {desc.type, desc.dims, ACL_FORMAT_ND, "", ACL_FORMAT_ND, desc.dims};
    }

    static Tensor in_memory(const GraphTensor& tensor) {
        if (is_private(tensor.desc.storage_format)) {
            const auto rows = at::empty(tensor.desc.dims, at::TensorOptions(*dtype_of(tensor)));
            copy_elements(tensor.desc, host_alias(tensor.memory.data, tensor.memory.size), in_rows(tensor.desc),
                          rows.data_ptr());
            return rows;
        }
        const auto elements = c10::multiply_integers(tensor.desc.dims);
        return whole(tensor).narrow(0, 0, elements).view(tensor.desc.dims);
    }

    static Tensor whole(const GraphTensor& tensor) {
        const auto dtype = *dtype_of(tensor);
        const auto elements = static_cast<std::int64_t>(tensor.memory.size / c10::elementSize(dtype));
        auto* const data = elements == 0 ? nullptr : host_alias(tensor.memory.data, tensor.memory.size);
        return at::from_blob(data, {elements}, at::TensorOptions(dtype));
    }

    const GraphCall& call_;
    const std::vector<Tensor>& on_host_;
};

inline void assign(const RunningOperator& call, const Tensor& result) {
    call.set_output(result.reshape(call.sizes_of_output()));
}

// Copies the inputs in host memory, which torch_npu frees after the call.
inline std::vector<Tensor> copies_of_host_inputs(const GraphCall& call) {
    std::vector<Tensor> copies;
    for (const auto& input : call.inputs) {
        copies.emplace_back();
        if (!input.desc.is_on_host) continue;
        const at::TensorOptions options(*dtype_of(input));
        copies.back() = at::from_blob(input.memory.data, input.desc.dims, options).clone();
    }
    return copies;
}

// Runs an operator. With `takes_all_memory`, it reads the memory as it is, so private formats are refused.
template <std::size_t inputs, void (*compute)(const RunningOperator&), bool takes_all_memory = false,
          std::size_t outputs = 1>
std::optional<std::string> run(const GraphCall& call) {
    if (call.inputs.size() != inputs || call.outputs.size() != outputs) {
        return "it has " + std::to_string(call.inputs.size()) + " inputs and " + std::to_string(call.outputs.size()) +
               " outputs; it must have " + std::to_string(inputs) + " and " + std::to_string(outputs);
    }
    for (const auto* const tensors : {&call.inputs, &call.outputs}) {
        for (const auto& tensor : *tensors) {
            if (tensor.desc.type == ACL_DT_UNDEFINED) continue;  // an absent optional input
            const auto type = std::to_string(tensor.desc.type);
            if (tensor.desc.type == ACL_BF16 && !has_bfloat16())
                return "a tensor has dtype bfloat16, which this chip does not have";
            if (!dtype_of(tensor)) return "a tensor has aclDataType " + type + ", which is not simulated";
            if (is_private(tensor.desc.storage_format) && (takes_all_memory || !has_places(tensor.desc))) {
                const auto format = std::to_string(tensor.desc.storage_format);
                return "a tensor has the private format " + format + ", which is not simulated";
            }
        }
    }
    const auto status = enqueue(call.stream, call.name, [call, on_host = copies_of_host_inputs(call)] {
        const c10::InferenceMode without_autograd;
        try {
            compute(RunningOperator(call, on_host));
        } catch (const c10::Error& error) {
            throw std::runtime_error(error.what_without_backtrace());
        }
    });
    if (status != ACL_SUCCESS) return "the launch failed with status " + std::to_string(status);
    return std::nullopt;
}

}  // namespace host_npu::graph
