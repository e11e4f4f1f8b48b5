"""Fleets of replicas in virtual time: real schedulers and managers, no model and no memory."""
