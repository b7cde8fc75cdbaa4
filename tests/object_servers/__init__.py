"""Small servers on loopback for the requests that the gs:// and az:// stores send, with faults on demand."""
