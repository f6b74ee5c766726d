"""What the losses of a linear layer's outputs share: options, shifted labels, and a vocabulary on several processes."""
