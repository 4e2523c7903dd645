"""Keys and values in fp8 (e4m3fn, Micikevicius et al., 2022), with a 16-bit scale for each vector."""

import jax.numpy as jnp

from jaxspec.kv.formats._slots import scaled

FORMAT = scaled(jnp.dtype(jnp.float8_e4m3fn))
