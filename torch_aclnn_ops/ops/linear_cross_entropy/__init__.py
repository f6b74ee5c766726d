"""The three raw operators of a vocab-parallel linear cross entropy, and the kernels built on them.

``fused_linear_online_max_sum`` reduces a shard's logits to three numbers per row,
``fused_cross_entropy_loss_with_max_sum`` computes the loss from them, and ``fused_linear_cross_entropy_loss_grad`` the
gradients of the shard's input and weight. Shapes: BT rows, H features, V classes of this shard.
"""
