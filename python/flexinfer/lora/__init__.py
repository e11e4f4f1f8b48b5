"""LoRA: adapters that requests choose, beside the one model that all of them share."""
