"""Which of several replicas takes a request. Knows nothing of engines, HTTP or clusters."""
