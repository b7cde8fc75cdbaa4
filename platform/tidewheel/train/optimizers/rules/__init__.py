"""The built-in optimizers' update rules in torch, where torch's own does not know parameters that are cut."""
