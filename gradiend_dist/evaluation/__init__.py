"""What was learnt: encodings of held-out and neutral rows, as tables and numbers."""
