"""The three operators of a vocabulary-parallel linear cross entropy.

``fused_linear_online_max_sum`` reduces one shard's logits to three numbers a row,
``fused_cross_entropy_loss_with_max_sum`` makes the loss of them, and ``fused_linear_cross_entropy_loss_grad`` the
gradients of the shard's input and weight. Letters in shapes: BT rows, H features, V classes of this shard.
"""
