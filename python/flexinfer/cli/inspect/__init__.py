"""`flexinfer inspect`: the memory map of a server."""
