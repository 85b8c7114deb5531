"""What to compute: the logical world, for all ranks at once. Imports nothing but errors."""
