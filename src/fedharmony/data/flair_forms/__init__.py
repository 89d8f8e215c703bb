"""The two forms in which FLAIR is spread, each read by a file of its own."""
