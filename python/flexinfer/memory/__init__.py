"""Memory: how much KV memory an engine has, and how it changes while serving."""
