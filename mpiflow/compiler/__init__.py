"""From a logical graph to a plan: pure functions, one file a step."""
