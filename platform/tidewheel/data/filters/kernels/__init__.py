"""Compiled passes of single filters."""
