"""How messages reach clients: in this process, or in several; to sites: ``flower``."""
