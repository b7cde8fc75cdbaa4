"""Optimizers by configuration, and the learning rate over the run."""
