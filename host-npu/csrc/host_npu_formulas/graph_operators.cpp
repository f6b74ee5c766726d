// The graph operators (aclop) of copies, casts, losses and embeddings, which torch_npu calls with jit_compile=True, and
// of functions that have no other implementation.
#include <torch/library.h>

#include "host_npu_formulas/adam.h"
#include "host_npu_formulas/masked_softmax.h"
#include "host_npu_formulas/running_operator.h"

namespace host_npu::graph {
namespace {

void transpose(const RunningOperator& call) { assign(call, call.input(0).permute(call.integers(1))); }

void cast(const RunningOperator& call) { assign(call, call.input(0)); }

void broadcast_to(const RunningOperator& call) { assign(call, call.input(0).expand(call.integers(1))); }

void fill(const RunningOperator& call) { call.set_output(call.input(1).reshape({})); }

void one_hot(const RunningOperator& call) {
    const auto axis = call.integer_attribute("axis");
    TORCH_CHECK(axis == -1, "the host NPU computes the axis -1 only, not ", axis);
    const auto is_on = call.input(0).unsqueeze(-1).eq(at::arange(call.sizes_of_output().back(), at::kLong));
    assign(call, at::where(is_on, call.input(1).reshape({}), call.input(2).reshape({})));
}

void slice(const RunningOperator& call) {
    auto part = call.input(0);
    const auto begins = call.integers(1), sizes = call.integers(2);
    for (std::size_t dim = 0; dim < begins.size(); ++dim) {
        const auto size = sizes[dim] == -1 ? part.size(dim) - begins[dim] : sizes[dim];
        part = part.narrow(static_cast<std::int64_t>(dim), begins[dim], size);
    }
    assign(call, part);
}

// Each mask bit is a dimension of which only the first element is taken.
void strided_slice(const RunningOperator& call) {
    auto part = call.input(0);
    const auto begins = call.integers(1), ends = call.integers(2), steps = call.integers(3);
    for (std::size_t index = 0; index < begins.size(); ++index) {
        const auto dim = static_cast<std::int64_t>(index);
        const bool shrinks = (call.integer_attribute("shrink_axis_mask") >> index & 1) != 0;
        part = shrinks ? part.select(dim, begins[index]).unsqueeze(dim)
                       : part.slice(dim, begins[index], ends[index], steps[index]);
    }
    assign(call, part);
}

// The inputs from `first` on are the sizes, the strides and the offset.
Tensor view(const RunningOperator& call, const Tensor& memory, std::size_t first) {
    return memory.as_strided(call.integers(first), call.integers(first + 1), call.integer(first + 2));
}

void as_strided(const RunningOperator& call) { assign(call, view(call, call.all_memory(0), 1)); }

void view_copy(const RunningOperator& call) {
    view(call, call.all_memory_of_output(), 1).copy_(view(call, call.all_memory(4), 5));
}

void mse_loss(const RunningOperator& call) {
    assign(call, at::mse_loss(call.floats(0), call.floats(1), call.reduction()));
}

void mse_loss_grad(const RunningOperator& call) {
    assign(call, at::mse_loss_backward(call.floats(2), call.floats(0), call.floats(1), call.reduction()));
}

void binary_cross_entropy(const RunningOperator& call) {
    assign(call, at::binary_cross_entropy(call.floats(0), call.floats(1), call.floats(2), call.reduction()));
}

void binary_cross_entropy_grad(const RunningOperator& call) {
    assign(call, at::binary_cross_entropy_backward(call.floats(2), call.floats(0), call.floats(1), call.floats(3),
                                                   call.reduction()));
}

// The loss of each row, and its gradient.
void softmax_cross_entropy(const RunningOperator& call) {
    const auto x = at::log_softmax(call.floats(0), -1), labels = call.floats(1);
    call.set_output(-(labels * x).sum(-1), 0);
    call.set_output(x.exp() - labels, 1);
}

void gather(const RunningOperator& call) {
    assign(call, call.input(0).index_select(call.integer(2), call.input(1).flatten()));
}

void embedding_dense_grad(const RunningOperator& call) {
    assign(call, at::embedding_dense_backward(call.floats(0), call.input(1), call.integer_attribute("num_weights"),
                                              call.integer_attribute("padding_idx"),
                                              call.integer_attribute("scale_grad_by_freq") != 0));
}

void scaled_masked(const RunningOperator& call) {
    assign(call, scaled_masked_softmax(call.floats(0), call.input(1), call.float_attribute("scale"),
                                       call.is_set("fixed_triu_mask")));
}

void scaled_masked_grad(const RunningOperator& call) {
    assign(call, scaled_masked_softmax_grad(call.floats(0), call.floats(1), call.input(2),
                                            call.float_attribute("scale"), call.is_set("fixed_triu_mask")));
}

void swish(const RunningOperator& call) {
    const auto x = call.floats(0);
    assign(call, x * at::sigmoid(x * call.float_attribute("scale")));
}

// Of the scale 1; the last input is the result of the forward pass.
void swish_grad(const RunningOperator& call) { assign(call, at::silu_backward(call.floats(0), call.floats(1))); }

void mish(const RunningOperator& call) { assign(call, at::mish(call.floats(0))); }

void mish_grad(const RunningOperator& call) { assign(call, at::mish_backward(call.floats(0), call.floats(1))); }

// Permutes dimensions before or after x gets a shape.
void confusion_transpose(const RunningOperator& call) {
    const auto x = call.is_set("transpose_first") ? call.input(0) : call.input(0).view(call.list_attribute("shape"));
    assign(call, x.permute(call.list_attribute("perm")));
}

void assign(const RunningOperator& call, const AdamStep& step) {
    call.set_output(step.var, 0);
    call.set_output(step.m, 1);
    call.set_output(step.v, 2);
}

void apply_adam_w(const RunningOperator& call) {
    const bool amsgrad = call.is_set("amsgrad");
    TORCH_CHECK(!amsgrad || call.has_input(11), "amsgrad needs max_grad_norm");
    assign(call, adam_w_step({call.floats(0), call.floats(1), call.floats(2)},
                             call.is_set("maximize") ? -call.floats(10) : call.floats(10),
                             amsgrad ? call.floats(11) : Tensor(), call.scalar(5), call.scalar(7), call.scalar(8),
                             call.scalar(6), call.scalar(9), 1 - call.scalar(3) * call.scalar(7),
                             1 - call.scalar(4) * call.scalar(8)));
}

// TensorFlow's Adam: the powers are those of this step, and epsilon is added before the corrections.
void apply_adam(const RunningOperator& call) {
    const auto beta1 = call.scalar(6), grad = call.floats(9);
    auto step = moments({call.floats(0), call.floats(1), call.floats(2)}, grad, beta1, call.scalar(7));
    const auto lr = call.scalar(5) * (1 - call.scalar(4)).sqrt() / (1 - call.scalar(3));
    const auto direction = call.is_set("use_nesterov") ? step.m * beta1 + grad * (1 - beta1) : step.m;
    step.var = step.var - lr * direction / (step.v.sqrt() + call.scalar(8));
    assign(call, step);
}

// BERT's Adam, without corrections. The document clips to max_grad_norm, the Ascend910B's kernel to 1.
void apply_adam_v2(const RunningOperator& call) {
    TORCH_CHECK(call.text_attribute("adam_mode") == "adam", "the host NPU computes adam_mode 0 only");
    const auto max_norm = call.scalar(8).item<float>(), norm = call.scalar(9).item<float>();
    TORCH_CHECK(max_norm <= 0 || max_norm == 1, "the host NPU clips to a max_grad_norm of 1 only, not ", max_norm);
    const auto grad = max_norm > 0 && norm > 1 ? call.floats(7) / norm : call.floats(7);
    auto step = moments({call.floats(0), call.floats(1), call.floats(2)}, grad, call.scalar(4), call.scalar(5));
    const auto update = step.m / (step.v.sqrt() + call.scalar(6)) + step.var * call.scalar(10);
    step.var = step.var - call.scalar(3) * update;
    assign(call, step);
}

std::optional<std::string> run_strided_slice(const GraphCall& call) {
    for (const auto* const mask : {"begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask"}) {
        const auto found = call.attributes.values.find(mask);
        if (found == call.attributes.values.end() || found->second == aclopAttr::Value(std::int64_t{0})) continue;
        return std::string("its attribute ") + mask + " is not 0, which is not simulated";
    }
    return run<4, strided_slice>(call);
}

// torch_npu documents four dimensions, of which the last two equal the mask's and are multiples of 32 up to 4096.
template <std::size_t inputs, void (*compute)(const RunningOperator&)>
std::optional<std::string> run_masked(const GraphCall& call) {
    if (call.inputs.size() == inputs) {
        try {
            require_shapes({{"x", call.inputs[0].desc.dims, "N C H%32<=4096 W%32<=4096"},
                            {"mask", call.inputs[inputs - 1].desc.dims, "N C H W | 1 C H W | N 1 H W | 1 1 H W"}});
        } catch (const Refusal& refusal) {
            return refusal.text;
        }
    }
    return run<inputs, compute>(call);
}

const bool registered = [] {
    simulate_graph_operator("Transpose", run<2, transpose>);
    simulate_graph_operator("Cast", run<1, cast>);
    simulate_graph_operator("BroadcastTo", run<2, broadcast_to>);
    simulate_graph_operator("Fill", run<2, fill>);
    simulate_graph_operator("OneHotD", run<3, one_hot>);
    simulate_graph_operator("Slice", run<3, slice>);
    simulate_graph_operator("StridedSlice", run_strided_slice);
    simulate_graph_operator("AsStrided", run<4, as_strided, true>);
    simulate_graph_operator("ViewCopy", run<8, view_copy, true>);
    simulate_graph_operator("MseLoss", run<2, mse_loss>);
    simulate_graph_operator("MseLossGrad", run<3, mse_loss_grad>);
    simulate_graph_operator("BinaryCrossEntropy", run<3, binary_cross_entropy>);
    simulate_graph_operator("BinaryCrossEntropyGrad", run<4, binary_cross_entropy_grad>);
    simulate_graph_operator("SoftmaxCrossEntropyWithLogits", run<2, softmax_cross_entropy, false, 2>);
    simulate_graph_operator("GatherV2", run<3, gather>);
    simulate_graph_operator("EmbeddingDenseGrad", run<2, embedding_dense_grad>);
    simulate_graph_operator("ScaledMaskedSoftmax", run_masked<2, scaled_masked>);
    simulate_graph_operator("ScaledMaskedSoftmaxGrad", run_masked<3, scaled_masked_grad>);
    simulate_graph_operator("Swish", run<1, swish>);
    simulate_graph_operator("SwishGrad", run<3, swish_grad>);
    simulate_graph_operator("Mish", run<1, mish>);
    simulate_graph_operator("MishGrad", run<2, mish_grad>);
    simulate_graph_operator("ConfusionTransposeD", run<1, confusion_transpose>);
    simulate_graph_operator("ApplyAdamW", run<12, apply_adam_w, false, 3>);
    simulate_graph_operator("ApplyAdamD", run<10, apply_adam, false, 3>);
    simulate_graph_operator("ApplyAdamV2", run<11, apply_adam_v2, false, 3>);
    return true;
}();

void call_simulated(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const InSimulatedFunction simulated;
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect),
                       stack);
}

// The functions of torch_npu that also call these operators with jit_compile=False.
TORCH_LIBRARY_IMPL(npu, BackendSelect, functions) {
    for (const auto* const name : {"npu_scaled_masked_softmax",
                                   "npu_scaled_masked_softmax_backward",
                                   "npu_apply_adam.out",
                                   "npu_apply_adam_w.out",
                                   "npu_bert_apply_adam.out",
                                   "npu_silu",
                                   "npu_silu_",
                                   "npu_silu_backward",
                                   "npu_mish",
                                   "npu_mish_backward",
                                   "npu_confusion_transpose",
                                   "npu_confusion_transpose_backward",
                                   "npu_transpose",
                                   "npu_transpose.out",
                                   "npu_broadcast",
                                   "npu_broadcast.out",
                                   "npu_slice",
                                   "npu_slice.out",
                                   "npu_one_hot",
                                   "npu_softmax_cross_entropy_with_logits",
                                   "npu_softmax_cross_entropy_with_logits_backward",
                                   "npu_iou",
                                   "npu_ptiou",
                                   "npu_giou",
                                   "npu_giou_backward",
                                   "npu_diou",
                                   "npu_diou_backward",
                                   "npu_ciou",
                                   "_npu_ciou",
                                   "npu_ciou_backward",
                                   "npu_conv2d",
                                   "npu_conv2d.out",
                                   "npu_conv2d_backward",
                                   "npu_deformable_conv2d",
                                   "npu_deformable_conv2dbk",
                                   "npu_yolo_boxes_encode",
                                   "npu_anchor_response_flags",
                                   "npu_bounding_box_encode",
                                   "npu_bounding_box_decode"}) {
        functions.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_simulated>());
    }
}

}  // namespace
}  // namespace host_npu::graph
