"""What follows from the matrix of targets: every generated file, the locks, the record of proofs."""
