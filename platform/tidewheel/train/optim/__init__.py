"""What optimizers and schedules are, and the optimizer of a whole model; the built-in ones are parts beside this."""
