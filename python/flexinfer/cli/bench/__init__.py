"""`flexinfer bench ...`."""
