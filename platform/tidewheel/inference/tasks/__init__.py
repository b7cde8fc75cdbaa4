"""Evaluation tasks from local files in the shape of lm-evaluation-harness: items, prompts, metrics, durable units."""
