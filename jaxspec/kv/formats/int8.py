"""Keys and values in 8-bit integers, with a 16-bit scale for each vector: half the bytes of bfloat16."""

import jax.numpy as jnp

from jaxspec.kv.formats._slots import scaled

FORMAT = scaled(jnp.dtype(jnp.int8))
