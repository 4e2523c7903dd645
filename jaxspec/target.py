"""What programs are compiled for."""

import jax


def platform() -> str:
    """cpu, gpu or tpu: of the mesh that is set, which need not be of this machine (`jaxspec.plan.topology`); else jax's
    own backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
