"""Measuring: scripts that print tables, each run as `python -m jaxspec.bench.NAME`."""
