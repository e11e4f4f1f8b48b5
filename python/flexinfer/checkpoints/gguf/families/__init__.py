"""The architectures that are known, by what they have in common; see ../architectures.py."""
