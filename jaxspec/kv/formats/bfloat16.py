"""Keys and values in bfloat16."""

import jax.numpy as jnp

from jaxspec.kv.formats._slots import plain

FORMAT = plain(jnp.dtype(jnp.bfloat16))
