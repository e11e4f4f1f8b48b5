"""`flexinfer demo`: six-turn chats whose later turns compute only their new tokens."""
