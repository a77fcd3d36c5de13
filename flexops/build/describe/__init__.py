"""What is to be built: families and their sources, operators and their schemas, what a `.cu`
says."""
