"""Speculation: tokens proposed ahead and verified in one step; see speculation.py."""
