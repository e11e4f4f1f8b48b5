"""From a model's text, piece by piece, to reasoning, content and calls; no HTTP in here."""
