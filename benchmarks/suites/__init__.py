"""One file a suite; each has SUITE, which benchmarks.__main__ lists."""
