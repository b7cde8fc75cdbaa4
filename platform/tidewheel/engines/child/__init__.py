"""Programs that run in the environment of an engine, which has neither Tidewheel nor what it needs."""
