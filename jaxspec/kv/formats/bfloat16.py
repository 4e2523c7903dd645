"""Keys and values in bfloat16."""

import jax.numpy as jnp

from jaxspec.kv.formats._plain import plain

FORMAT = plain(jnp.dtype(jnp.bfloat16))
