"""What a chip can do, as far as kernels and plans need it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One accelerator as JAX sees it: where a chip is two JAX devices, each has half of it."""

    name: str
    """As topologies begin: v5e of v5e:2x4."""
    clock_hz: float
    """Of the core that issues instructions; a TPU issues one bundle of them a cycle."""
    hbm_bytes: int
    hbm_bytes_per_s: float
    vmem_bytes: int
    """Fast memory of one core: VMEM of a TensorCore, shared memory of a GPU's multiprocessor."""
    bf16_flops: float
    """A second, of matrix products without sparsity, two for each multiplication and addition; so the next two."""
    int8_flops: float | None
    """None: the matrix unit does not take them, and they are worth what they are turned into."""
    fp8_flops: float | None
    """The same of float8_e4m3fn."""
    link_bytes_per_s: float
    """One way over one link to a neighbour."""
    links: int
    devices: int
    """JAX devices that a chip is."""

    @property
    def hbm_bytes_per_cycle(self) -> float:
        return self.hbm_bytes_per_s / self.clock_hz
