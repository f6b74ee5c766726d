#include "atb/computed.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "host_npu_formulas/scalar_type.h"

namespace atb {
namespace {

at::IntArrayRef sizes(const Tensor& tensor) {
    return {tensor.desc.shape.dims.data(), static_cast<std::size_t>(tensor.desc.shape.rank)};
}

at::TensorOptions options(const Tensor& tensor) {
    const auto dtype = host_npu::scalar_type(tensor.desc.dtype);
    TORCH_CHECK(dtype.has_value(), "a tensor has aclDataType ", int(tensor.desc.dtype), ", which is not simulated");
    return at::TensorOptions(*dtype);
}

// A host tensor, as a copy that outlives the call, or a device tensor.
struct Argument {
    explicit Argument(const Tensor& tensor) : tensor(tensor) {
        TORCH_CHECK(tensor.desc.format != ACL_FORMAT_FRACTAL_NZ, "the host NPU takes no tensor in FRACTAL_NZ");
        if (tensor.host_data != nullptr)
            on_host = at::from_blob(tensor.host_data, sizes(tensor), options(tensor)).clone();
    }

    at::Tensor described() const {
        return on_host.defined() ? on_host
                                 : at::Tensor(at::detail::empty_meta(sizes(tensor), options(tensor).device(at::kMeta)));
    }

    at::Tensor in_memory() const {
        if (on_host.defined()) return on_host;
        // Empty tensors have no memory.
        auto* const data = tensor.size == 0 ? nullptr : host_npu::host_alias(tensor.device_data, tensor.size);
        return at::from_blob(data, sizes(tensor), options(tensor));
    }

    Tensor tensor;
    at::Tensor on_host;
};

using Arguments = std::vector<Argument>;

Tensors tensors_of(const Arguments& arguments, at::Tensor (Argument::*tensor)() const) {
    Tensors tensors;
    for (const auto& argument : arguments) tensors.push_back((argument.*tensor)());
    return tensors;
}

void compute(const Formula& formula, const Arguments& inputs, const Arguments& outputs) {
    const c10::InferenceMode without_autograd;
    try {
        const auto results = formula.compute(tensors_of(inputs, &Argument::in_memory));
        for (std::size_t index = 0; index < results.size(); ++index) {
            const auto out = outputs[index].in_memory();
            out.copy_(results[index].reshape(out.sizes()));
        }
    } catch (const c10::Error& error) {
        throw std::runtime_error(error.what_without_backtrace());
    }
}

}  // namespace

std::vector<std::int64_t> numbers(const at::Tensor& tensor) {
    const auto wide = tensor.to(at::kLong).contiguous();
    return {wide.const_data_ptr<std::int64_t>(), wide.const_data_ptr<std::int64_t>() + wide.numel()};
}

void require_int32(const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.scalar_type() == at::kInt, name, " has dtype ", c10::getDtypeNames(tensor.scalar_type()).first,
                " instead of int32");
}

Status Computed::InferShape(const SVector<TensorDesc>&, SVector<TensorDesc>&) const {
    throw std::runtime_error(not_simulated(name_ + "::InferShape"));
}

Status Computed::Setup(const VariantPack&, std::uint64_t& workspace_size, Context*) {
    workspace_size = 0;
    return 0;
}

// torch_npu ignores the status.
Status Computed::Execute(const VariantPack& tensors, std::uint8_t*, std::uint64_t, Context* context) {
    try {
        const Arguments inputs(tensors.inputs.begin(), tensors.inputs.end());
        const Arguments outputs(tensors.outputs.begin(), tensors.outputs.end());
        formula_.check(tensors_of(inputs, &Argument::described), tensors_of(outputs, &Argument::described));
        return host_npu::enqueue(context->GetExecuteStream(), name_,
                                 [inputs, outputs, formula = formula_] { compute(formula, inputs, outputs); });
    } catch (const c10::Error& error) {
        const auto text = "ATB's " + name_ + ": " + error.what_without_backtrace();
        // A failure on the thread of torch_npu's queue would end the queue; the next call raises it instead.
        if (host_npu::refuse_after_queue(text)) return 0;
        throw std::runtime_error(text);
    }
}

}  // namespace atb
