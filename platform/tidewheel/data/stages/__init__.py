"""The stages of a data pipeline, one module each: pure functions from published units to published units."""
