"""Numbers of blocks' inputs on their way between a device, host memory and disk. Nothing here imports torch."""

LEAVING = 2
"""Inputs that stay on a GPU while they are copied. An older one is freed, once the computation waited for its copy.
Without the limit, a host that runs ahead would allocate memory for all of them."""
BUFFERS = 4
"""Inputs in host memory on their way to and from disk: what was written last is read from there."""
AHEAD_OF_HOST, AHEAD_OF_DISK = 1, 2
"""Inputs that are fetched before the backward pass needs them."""
