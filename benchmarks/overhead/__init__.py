"""The cost of orchestration without the engine: `make bench-overhead`, or `python -m benchmarks.overhead`."""
