"""KV events: tells routers elsewhere which blocks of tokens are cached here, as vLLM does."""
