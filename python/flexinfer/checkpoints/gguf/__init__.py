"""GGUF files, the form of llama.cpp; see checkpoint.py, and families/ for what models they have."""
