"""Engine: the step loop, and what callers get of it."""
