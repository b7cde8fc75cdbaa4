"""The memory tier: the newest states, in memory of their node and of a buddy node, outside the training processes.

A worker copies its part of the state into a slot (`client`), the node's agent hashes it and sends a copy to the
buddy's agent (`agent`), and whoever is left after a failure reads the newest step that is whole (`restore`).
"""
