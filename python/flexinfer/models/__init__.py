"""Models: loading through transformers, and which of them the engine can run."""
