"""Requests and answers of the HTTP interface as pydantic models: one file an endpoint."""
