#include "host_npu_formulas/formula.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <map>
#include <stdexcept>

#include "host_npu_formulas/scalar_type.h"

namespace host_npu {
namespace {

thread_local bool casts_as_in_torch = false;

// While one exists, assigning to an output raises for casts that PyTorch refuses, such as from floats to integers. Used
// for functions whose output dtypes are not documented.
class CastsAsInTorch {
  public:
    explicit CastsAsInTorch(bool required) { casts_as_in_torch = required; }
    ~CastsAsInTorch() { casts_as_in_torch = false; }
    CastsAsInTorch(const CastsAsInTorch&) = delete;
    CastsAsInTorch& operator=(const CastsAsInTorch&) = delete;
};

at::IntArrayRef sizes(const Dims& dims) { return {dims.begin(), dims.rank()}; }

struct Shape {
    std::vector<std::int64_t> sizes, strides;
};

// The shape of the PyTorch tensor, which counts packed elements in pairs. torch_npu gives the offset of a packed view
// in pairs, while CANN expects elements.
Shape shape_of(const Layout& layout) {
    const auto given = sizes(layout.shape), strides = sizes(layout.strides);
    Shape shape{given.vec(), strides.vec()};
    if (!is_packed(layout.dtype) || layout.empty()) return shape;
    TORCH_CHECK(layout.offset == 0, "the host NPU takes tensors of ", dtype_name(layout.dtype),
                " from the start of their memory only, not from element ", layout.offset);
    const auto packed = packed_dimension(strides);
    for (std::size_t dim = 0; dim < given.size(); ++dim) {
        auto& count = dim == packed ? shape.sizes[dim] : shape.strides[dim];
        TORCH_CHECK(count % 2 == 0 || given[dim] == 1, "a tensor of ", dtype_name(layout.dtype), " has shape ", given,
                    " and strides ", strides, ", which are not those of pairs");
        count /= 2;
    }
    return shape;
}

}  // namespace

std::size_t packed_dimension(at::IntArrayRef strides) {
    const auto last = strides.size() - 1;
    const auto found = strides[last] == 1 ? last : std::ranges::find(strides, 1) - strides.begin();
    return std::min(last, static_cast<std::size_t>(found));
}

Tensor meta_tensor(const aclTensor* tensor) {
    if (tensor == nullptr) return {};
    const auto& layout = tensor->layout;
    const auto shape = shape_of(layout);
    const auto options = at::TensorOptions(*named_type(layout.dtype)).device(at::kMeta);
    // Strides determine the packed dimension.
    if (is_packed(layout.dtype)) return at::empty_strided(shape.sizes, shape.strides, options);
    return at::empty(shape.sizes, options);
}

namespace {

// Converts matrices in FRACTAL_NZ, which store columns of tiles, to rows. A view may be transposed.
Tensor rows_of_tiles(const HostTensor& tensor) {
    const auto& layout = *tensor.layout;
    const auto rank = static_cast<std::int64_t>(layout.shape.rank());
    TORCH_CHECK(layout.offset == 0 && rank >= 2 && layout.storage_shape.rank() == layout.shape.rank() + 2,
                "a tensor of shape ", sizes(layout.shape), " in FRACTAL_NZ is stored as ", sizes(layout.storage_shape));
    const auto tiles =
        at::from_blob(tensor.data, sizes(layout.storage_shape), at::TensorOptions(*named_type(layout.dtype)));
    const auto rows = tiles.movedim(rank - 2, rank).flatten(rank, rank + 1).flatten(rank - 2, rank - 1);
    const auto shape = sizes(layout.shape);
    const bool is_transposed = layout.strides[layout.shape.rank() - 2] == 1 && shape[rank - 1] > 1;
    const auto all = is_transposed ? rows.mT() : rows;
    return all.slice(-2, 0, shape[rank - 2]).slice(-1, 0, shape[rank - 1]);
}

}  // namespace

Tensor in_memory(const HostTensor& tensor) {
    if (!tensor) return {};
    if (tensor->format == ACL_FORMAT_FRACTAL_NZ && !tensor->empty()) return rows_of_tiles(tensor);
    const auto [shape, strides] = shape_of(*tensor.layout);
    return at::from_blob(tensor.data, shape, strides, at::TensorOptions(*named_type(tensor->dtype)));
}

std::string name_of(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

void require_indices(const char* name, const Tensor& indices, std::int64_t size) {
    if (indices.is_meta() || indices.numel() == 0) return;
    for (const auto& extreme : {indices.min(), indices.max()}) {
        const auto index = extreme.item<std::int64_t>();
        TORCH_CHECK(index >= 0 && index < size, name, " has the index ", index, "; CANN takes 0 to ", size - 1);
    }
}

Tensor widened(const Tensor& tensor) { return tensor.to(at::kFloat); }

double number(const aclScalar* scalar) {
    require(scalar != nullptr, kNullPointer, "a scalar is a null pointer");
    const auto type = scalar_type(scalar->dtype);
    if (scalar->dtype == ACL_DOUBLE) return *reinterpret_cast<const double*>(scalar->value.data());
    require(type.has_value(), kParamInvalid, "a scalar has dtype ", dtype_name(scalar->dtype));
    const auto value = at::from_blob(const_cast<std::byte*>(scalar->value.data()), {}, at::TensorOptions(*type));
    return value.to(at::kDouble).item<double>();
}

void Out::operator=(const Tensor& result) const {
    TORCH_CHECK(tensor_.sizes() == result.sizes(), "an output has shape ", tensor_.sizes(), " instead of ",
                result.sizes());
    TORCH_CHECK(!casts_as_in_torch || c10::canCast(result.scalar_type(), dtype()), "result type ",
                name_of(result.scalar_type()), " can't be cast to the desired output type ", name_of(dtype()));
    tensor_.copy_(result);
}

Tensor Out::rounded() const { return widened(tensor_); }

namespace {

// Evaluates a formula; `tensor_of` returns the tensor at an index of the call.
template <class TensorOf>
void evaluate(const Evaluation& evaluation, const TensorOf& tensor_of) {
    const c10::InferenceMode without_autograd;
    std::size_t index = 0;
    evaluation([&] { return tensor_of(index++); });
}

}  // namespace

void evaluate_without_memory(const Evaluation& evaluation, const Tensors& tensors) {
    try {
        evaluate(evaluation, [&](std::size_t index) { return meta_tensor(tensors[index]); });
    } catch (const c10::Error& error) {
        throw Refusal{kParamInvalid, error.what_without_backtrace()};
    } catch (const std::exception& error) {
        // Raised by a shape function in Python; the text includes a traceback.
        const std::string text = error.what();
        throw Refusal{kParamInvalid, text.substr(0, text.find('\n'))};
    }
}

void evaluate_in_memory(const Evaluation& evaluation, const KernelArguments& memory) {
    try {
        evaluate(evaluation, [&](std::size_t index) { return in_memory(memory[index]); });
    } catch (const c10::Error& error) {
        throw std::runtime_error(error.what_without_backtrace());
    } catch (const Refusal& refusal) {
        throw std::runtime_error(refusal.text);
    }
}

namespace {

// The exported functions and the types of their phase one.
std::map<std::string, const std::type_info*>& exported_types() {
    static std::map<std::string, const std::type_info*> types;
    return types;
}

}  // namespace

void export_formula(const Api& names, Rules& exported, Rules rules, std::size_t count, AnyFunction phase_one,
                    AnyFunction phase_two, const std::type_info& type) {
    require_one_for_each(rules, count, names.phase_two);
    exported = std::move(rules);
    exported_types()[names.phase_two] = &type;
    answer(names.phase_two, phase_one, phase_two, !exported.tensors.empty());
}

Plan plan_of(const Rules& rules, const Tensors& tensors, Evaluation evaluation) {
    const CastsAsInTorch casts(rules.tensors.empty());
    evaluate_without_memory(evaluation, tensors);
    return {.kernel = [evaluation = std::move(evaluation)](const KernelArguments& memory) {
        evaluate_in_memory(evaluation, memory);
    }};
}

}  // namespace host_npu

// Returns a line for each function: its name and the arguments of phase one. csrc/build.py generates headers from it.
extern "C" HOST_NPU_EXPORT const char* host_npu_arguments() {
    static std::string lines;
    lines.clear();
    for (const auto& [name, type] : host_npu::exported_types()) {
        const auto text = c10::demangle(type->name());
        lines += name + " " + text.substr(text.find('(')) + "\n";
    }
    return lines.c_str();
}
