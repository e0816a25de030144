"""Where the reference has what is about predicting a word."""
