"""Prefill here, decode there: servers of one machine that hand each other's KV over."""
