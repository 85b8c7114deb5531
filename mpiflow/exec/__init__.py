"""One rank executes its slice of a plan."""
