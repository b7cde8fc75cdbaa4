"""Objectives of reinforcement learning: policy gradients over rollouts."""
