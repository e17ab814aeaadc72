"""The parts of `benchmarks/fidelity.py`: one module a set of public measurements."""
