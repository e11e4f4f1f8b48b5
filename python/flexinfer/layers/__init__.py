"""Layers: what takes the place of a loaded model's modules and computes the same in fewer calls."""
