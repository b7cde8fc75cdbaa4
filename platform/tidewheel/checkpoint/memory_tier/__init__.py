"""The memory tier: the newest snapshots, in memory of their node and of another node, outside the training processes.

A worker copies its part of the state into a slot (`client`). The node's agent hashes the slot and sends a replica to
an agent of another node (`agent`). After a failure, the surviving workers read the newest complete step (`restore`).
"""
