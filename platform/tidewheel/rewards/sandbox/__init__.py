"""Running a model's code: cases to test it with, a process of its own, and what the kernel keeps that process from."""
