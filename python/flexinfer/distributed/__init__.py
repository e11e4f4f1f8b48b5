"""Distributed: one engine over several processes; docs/scale_out.md has pictures."""
