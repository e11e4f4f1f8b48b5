"""Metrics: what steps and requests took, as plain values. No torch."""
