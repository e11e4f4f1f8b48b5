"""`flexinfer top`: a server live at the terminal."""
