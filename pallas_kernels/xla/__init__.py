"""Implementations in plain XLA operations: they run everywhere and are what the kernels are compared with."""
