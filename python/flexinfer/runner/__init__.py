"""Runner: from the plan of a step to its tokens."""
