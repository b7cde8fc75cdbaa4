"""Update rules of the built-in optimizers, where torch's rule does not handle sharded parameters."""
