"""Mixture of experts: settings, router, experts, the layer that joins them, and load balancing."""
