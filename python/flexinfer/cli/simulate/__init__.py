"""`flexinfer simulate`: a trace on a fleet of replicas, in virtual time."""
