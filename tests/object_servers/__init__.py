"""Small servers on loopback for the requests that the gs:// and az:// stores send, with faults on demand.

Checked by hand against gcp-storage-emulator 2026.7.19 and azurite 3.37.0: the store tests pass on those, too.
"""
