"""`flexinfer doctor`: what this machine offers and lacks."""
