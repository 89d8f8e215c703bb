"""One file per table, figure, algorithm or theorem of the paper; each is found by itself."""
