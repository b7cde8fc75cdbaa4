"""Small loopback servers for the requests of the gs:// and az:// stores, with faults on demand."""
