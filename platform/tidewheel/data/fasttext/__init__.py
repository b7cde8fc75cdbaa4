"""Models in the format of fastText: read, applied and trained."""

WANTED, OTHER = "__label__hq", "__label__lq"
"""Labels of the documents to keep, and of the others, in a classifier that is trained here."""
