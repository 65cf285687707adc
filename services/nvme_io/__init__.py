"""The owner of regions, of room in HOST and of the cold store: moves bytes and knows nothing of models."""
