"""Files rendered from the matrix of targets, the locks, and the record of tests."""
