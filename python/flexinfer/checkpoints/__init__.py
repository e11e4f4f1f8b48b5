"""Checkpoints whose weights are read one by one, as they are stored; see checkpoint.py."""
