"""Inference: text from a trained model, and scores of a checkpoint. Runs in one process, beside or after a training."""
