"""Models in fastText's format: loading, inference and training."""

HIGH_QUALITY = "__label__hq"
"""Label of the documents to keep in classifiers that Tidewheel trains."""
LOW_QUALITY = "__label__lq"
"""Label of the other documents."""
