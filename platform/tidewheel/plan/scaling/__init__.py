"""Scaling laws: published ones, budgets that follow from them, and fits to runs of one's own."""
