"""Tokenization of texts and conversations, and packing of tokens into rows."""
