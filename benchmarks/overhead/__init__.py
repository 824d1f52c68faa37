"""What orchestration costs beside the engine: `make bench-overhead`, or `python -m benchmarks.overhead`."""
