"""Optimizers for study and comparison, one module each."""
