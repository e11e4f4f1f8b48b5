"""What the server tells of itself: logs, metrics, traces, the memory map."""
