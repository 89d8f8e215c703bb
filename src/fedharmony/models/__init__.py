"""Client-stacked models: backbones (one file each) and heads. ``models.names()`` lists them."""
