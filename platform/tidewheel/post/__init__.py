"""Reinforcement learning: rollouts, their schedule and ledger, and the weights they are sampled with."""
