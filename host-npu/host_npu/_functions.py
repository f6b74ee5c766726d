"""The operators that functions of torch_npu call, where the operators' names do not show it."""

# Functions of torch_npu whose names differ from their operators', and the prefix of the operators' names.
OTHER_NAMES = {
    "npu_add_quant_gmm": "QuantGroupedMatmulInplaceAdd",
    "npu_add_quant_matmul": "QuantBatchMatmulInplaceAdd",
    "npu_advance_step_flashattn": "AdvanceStep",
    "npu_all_gather_base_mm": "AllGatherMatmul",
    "npu_alltoallv_gmm": "AlltoAllvGroupedMatMul",
    "npu_alltoallv_quant_gmm": "AlltoAllvQuantGroupedMatMul",
    "npu_attn_softmax_": "Softmax",
    "npu_batch_gather_matmul": "AddLora",
    "npu_dropout_backward": "DropoutDoMask",
    "npu_dtype_cast": "Cast",
    "npu_dynamic_quant_asymmetric": "DynamicQuant",
    "npu_fusion_attention": "FlashAttention",
    "npu_gmm_alltoallv": "GroupedMatMulAlltoAllv",
    "npu_kronecker_quant": "FlatQuant",
    "npu_linear": "Addmm",
    "npu_mm_all_reduce_base": "MatmulAllReduce",
    "npu_mm_reduce_scatter_base": "MatmulReduceScatter",
    "npu_mrope": "RopeWithSinCosCache",
    "npu_nsa_compress_infer": "NsaCompressWithCache",
    "npu_nsa_select_attention": "NsaSelectedAttention",
    "npu_nsa_select_attention_infer": "NsaSelectedAttentionInfer",
    "npu_quant_fusion_attention": "QuantFlashAttention",
    "npu_quant_gmm_alltoallv": "QuantGroupedMatMulAlltoAllv",
    "npu_quant_matmul_gelu": "FusedQuantMatmul",
    "npu_rotary_mul": "RotaryPositionEmbedding",
    "npu_sim_exponential_": "SimThreadExponential",
}

# Computed operators of ATB, by the prefix of the functions that call them.
ATB = {
    "_npu_flash_attention": "SelfAttention",
    "_npu_group_topk": "GroupTopk",
    "_npu_matmul_add_fp32": "Linear",
    "_npu_paged_attention": "PagedAttention",
    "_npu_quant_rms_norm": "RmsNorm",
    "_npu_quantize_per_tensor": "Elewise",
    "_npu_reshape_and_cache": "ReshapeAndCache",
    "_npu_rotary_embedding": "Rope",
    "npu_fused_add_topk_div": "FusedAddTopkDiv",
    "npu_multi_head_latent_attention": "MLA",
    "npu_paged_cache_load": "PagedCacheLoad",
    "npu_ring_mla": "RingMLA",
    "npu_self_attention_prefix_encoder": "SelfAttention",
}

# Operators of internal functions: gradients and parts of other functions.
CALLED = {
    "_gru_npu": "GRU",
    "_gru_npu_backward": "GRUBackward",
    "_lstm_npu": "LSTM",
    "_lstm_npu_backward": "LstmBackward",
    "_npu_dtype_cast": "Cast",
    "_npu_dtype_cast_backward": "Cast",
    "_npu_fusion_attention_grad_v3_get_max_workspace": "FlashAttentionUnpaddingScoreGradV5",
    "_npu_fusion_attention_v3_get_max_workspace": "FlashAttentionVarLenScoreV5",
    "_npu_rms_norm_backward_quant": "RmsNormGradQuant",
    "_quantize_per_channel_impl": "Quantize",
    "_quantize_per_tensor_impl": "Quantize",
    "batch_norm_gather_stats_update": "SyncBatchNormGatherStats",
    "matmul_double_backward": "Matmul",
    "npu_attn_softmax_backward_": "SoftmaxBackward",
    "npu_dtype_cast_backward": "Cast",
    "npu_fused_linear_cross_entropy_loss_with_max_sum_backward": "FusedLinearCrossEntropyLossGrad",
    "npu_gather_sparse_index": "GatherV3",
    "npu_gather_sparse_index_backward": "IndexAddV2",
    "npu_linear_backward": "Mm",
    "npu_renorm_backward": "LinalgVectorNorm",
    "obfuscation_finalize": "ObfuscationSetupV2",
    "obfuscation_initialize": "ObfuscationSetupV2",
    "repeat_interleave_backward_tensor": "RepeatInterleaveGrad",
    "slow_conv_dilated2d_backward": "ConvolutionBackward",
    "slow_conv_transpose2d_backward": "ConvolutionBackward",
}

# Functions that call no operator, or only PyTorch's.
RUNNING = """
    _npu_fused_infer_attention_score_get_max_workspace _npu_fused_infer_attention_score_infer_output
    _npu_fused_infer_attention_score_v2_get_max_workspace _npu_fused_infer_attention_score_v2_infer_output
    _npu_fusion_attention_grad_v3_infer_output _npu_fusion_attention_v3_infer_output copy_memory_ empty_with_format
    fft_c2r_backward fft_r2c_backward get_npu_format get_storage_size npu_change_data_ptr
    npu_convert_weight_to_int4pack npu_gather_backward npu_prefetch npu_reshape print_npugraph_tensor
    repeat_interleave_backward_int save_npugraph_tensor set_op_timeout_ms stft_backward unsafe_empty_with_format
""".split()

# Notes on functions that do not follow from an operator's name.
ANSWERS = {
    **dict.fromkeys(RUNNING, "runs, without an operator of CANN"),
    **dict.fromkeys(
        ("super_kernel_scope_begin", "super_kernel_scope_end"), "refused, needs CANN's library libascendsk.so"
    ),
    "empty_with_swapped_memory": "refused, there are no device addresses of host memory",
    **dict.fromkeys(
        ("npu_all_gather_quant_mm", "npu_quant_mm_reduce_scatter"),
        "refused, as are all products of quantized tensors that also communicate",
    ),
}

# Functions that torch_npu 2.13 implements with graph operators on the default chip; see
# tests/npu/test_every_operator.py.
GRAPH_FUNCTIONS = """
    npu_alloc_float_status npu_batch_nms npu_bmmV2 npu_clear_float_status npu_conv3d npu_conv_transpose2d
    npu_convolution npu_convolution_transpose npu_dropout_do_mask npu_dropout_with_add_softmax npu_fused_attention_score
    npu_get_float_status npu_grid_assign_positive npu_gru npu_ifmr npu_indexing npu_layer_norm_eval npu_lstm
    npu_lstm_cell npu_lstm_data npu_masked_fill_range npu_max npu_min npu_multi_head_attention npu_nms_rotated
    npu_nms_v4 npu_nms_with_mask npu_normalize_batch npu_pad npu_ps_roi_pooling npu_quant_conv2d
    npu_random_choice_with_mask npu_rotated_box_decode npu_rotated_box_encode npu_rotated_iou npu_rotated_overlaps
    npu_scatter npu_sign_bits_pack npu_sign_bits_unpack npu_sort_v2 npu_stride_add npu_stride_copy npu_sub_sample
    npu_view_copy
""".split()

# The same for internal functions, apart from gradients of the functions above.
PARTS_OF_GRAPH_FUNCTIONS = """
    _amp_foreach_non_finite_check _conv_depthwise2d_backward _dropout_with_byte_mask _dropout_with_byte_mask_backward
    _npu_silent_check dropout_with_byte_mask npu_bmm_v2_mat1_backward npu_bmm_v2_mat2_backward
    npu_conv_transpose3d_backward npu_fused_attention_layernorm_qkv_fwd npu_fused_attention_qkv_grad
""".split()

# The same for functions whose graph operator is simulated.
SIMULATED_FUNCTIONS = {
    "_npu_ciou": "CIoU",
    "npu_anchor_response_flags": "AnchorResponseFlags",
    "npu_apply_adam": "ApplyAdamD",
    "npu_apply_adam_w": "ApplyAdamW",
    "npu_bert_apply_adam": "ApplyAdamV2",
    "npu_bounding_box_decode": "BoundingBoxDecode",
    "npu_bounding_box_encode": "BoundingBoxEncode",
    "npu_broadcast": "BroadcastTo",
    "npu_ciou": "CIoU",
    "npu_ciou_backward": "CIoUGrad",
    "npu_confusion_transpose": "ConfusionTransposeD",
    "npu_confusion_transpose_backward": "ConfusionTransposeD",
    "npu_conv2d": "Conv2D",
    "npu_conv2d_backward": "Conv2DBackpropInput",
    "npu_deformable_conv2d": "DeformableOffsets",
    "npu_deformable_conv2dbk": "DeformableOffsetsGrad",
    "npu_diou": "DIoU",
    "npu_diou_backward": "DIoUGrad",
    "npu_giou": "GIoU",
    "npu_giou_backward": "GIoUGrad",
    "npu_iou": "Iou",
    "npu_mish": "Mish",
    "npu_mish_backward": "MishGrad",
    "npu_one_hot": "OneHotD",
    "npu_ptiou": "Iou",
    "npu_scaled_masked_softmax": "ScaledMaskedSoftmax",
    "npu_silu": "Swish",
    "npu_silu_": "Swish",
    "npu_silu_backward": "SwishGrad",
    "npu_slice": "Slice",
    "npu_softmax_cross_entropy_with_logits": "SoftmaxCrossEntropyWithLogits",
    "npu_softmax_cross_entropy_with_logits_backward": "SoftmaxCrossEntropyWithLogits",
    "npu_transpose": "Transpose",
    "npu_yolo_boxes_encode": "YoloBoxesEncode",
}
