"""What makes steps fast on a GPU: compiled pieces, recorded graphs. The plain path needs none."""
