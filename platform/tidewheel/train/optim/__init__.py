"""The bases of optimizers and schedules, and the optimizer of a whole model."""
