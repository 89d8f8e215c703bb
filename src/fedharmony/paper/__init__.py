"""The FedHarmony paper (arXiv 2604.28024) item by item: its claims beside what is found here."""
