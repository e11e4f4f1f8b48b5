"""`flexinfer serve`: the server, its options, and the file that they may come from."""
