"""Keys and values in float32."""

import jax.numpy as jnp

from jaxspec.kv.formats._slots import plain

FORMAT = plain(jnp.dtype(jnp.float32))
