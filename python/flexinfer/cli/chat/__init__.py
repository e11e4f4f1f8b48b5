"""`flexinfer chat`: a conversation at the terminal, with a local engine or any server."""
