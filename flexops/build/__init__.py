"""From an operator's description to a loaded library; README.md describes the life of a build."""
