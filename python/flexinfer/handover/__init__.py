"""Hand-over: KV that moves between processes of one machine, as descriptors of its memory."""
