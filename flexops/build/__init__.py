"""From an operator's description to a loaded library; README.md tells the life of a build."""
