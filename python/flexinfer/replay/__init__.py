"""Replay: the operations of a trace, read and run again on any driver."""
