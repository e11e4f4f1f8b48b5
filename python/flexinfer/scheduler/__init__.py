"""Scheduler: which requests compute which tokens in a step, and with what memory. No torch."""
