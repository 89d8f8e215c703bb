"""Real federations on Flower: the server's side, the relay at a site, and the operator's tools."""
