"""HTTP around the endpoints: keys, limits, errors, streams, certificates."""
