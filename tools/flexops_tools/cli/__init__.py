"""The commands. Only these modules print."""
