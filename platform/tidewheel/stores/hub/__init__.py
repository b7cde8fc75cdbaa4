"""Data sets and models of the Hugging Face hub: their URIs, requests with retries, and the read-only store."""
