"""What the server remembers from one request to the next: conversations and responses."""
