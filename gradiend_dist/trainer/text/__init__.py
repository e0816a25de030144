"""Where the reference has what is about texts."""
