"""The host's side of the engine: requests, pages and rows, text. Plain Python, no jax."""
