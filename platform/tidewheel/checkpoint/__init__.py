"""Checkpoints: sharded, asynchronous, hashed while they stream, published by one manifest, verified before use."""
