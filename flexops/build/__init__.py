"""From an op's description to a loaded library: plan, key, cache, compile, judge, load."""
