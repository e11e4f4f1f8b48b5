"""Sampling: from logits to tokens: parameters, sampler, grammars."""
