"""What the losses of a linear layer's outputs share: how rows and classes are cut, and the matrix products."""
