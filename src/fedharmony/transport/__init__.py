"""How messages reach clients: in this process, or (later) through Flower."""
