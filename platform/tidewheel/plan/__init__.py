"""Plan a run before it starts: memory, step time, layouts, failures and cost."""
