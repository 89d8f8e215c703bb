"""How messages reach clients: in this process, or in those of a crew; to sites: ``flower``."""
