"""What holds for rows of the matrix: kernels against the baseline, operators against their
references with a row's torch. Needs no GPU."""
