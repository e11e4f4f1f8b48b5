"""Load generator: requests for any server that speaks OpenAI's interface, and what they took.

`workload` says what is asked, `arrivals` when, `client` asks, `load` runs it, `summary` reckons.
Knows nothing of the engine: `flexinfer bench serve` is its command.
"""
