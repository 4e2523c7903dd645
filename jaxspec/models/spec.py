"""What a decoder-only transformer is made of, as frozen switches that a compiled program may depend on."""

import math
from dataclasses import dataclass, replace

from jaxspec.errors import ConfigError

LANES = 128
"""Of several devices each has a multiple of so many words: a TPU's lanes, and the rows of a block of weights."""


def padded_vocab(size: int, devices: int) -> int:
    """Rows for a vocabulary of so many that devices can share."""
    multiple = devices * LANES if devices > 1 else 1
    return math.ceil(size / multiple) * multiple


@dataclass(frozen=True)
class ModelSpec:
    """The static shape of one model. Hashable: two models with equal specs share compiled programs."""

    vocab_size: int
    """Rows of the embedding, padding rows included."""
    valid_vocab: int
    """Token ids the tokenizer knows; ids from here up to `vocab_size` are padding and are never sampled."""
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm_eps: float
    inv_freq: tuple[float, ...]
    """RoPE frequencies in radians a position, `head_dim // 2` of them, any scaling already applied."""
    max_context: int
    """Positions the model was trained for, in tokens."""
    tied_embeddings: bool
    """The output projection is the embedding itself: parameters hold no `lm_head`."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    added_vocab: int = 0
    """Rows of the embedding that no checkpoint has."""
    share: int = 1
    """Devices of which each has a share of every layer; heads and `mlp_dim` are then those of one share."""

    def spread(self, devices: int) -> "ModelSpec":
        """The same model made such that it can be shared by so many devices: key/value heads are repeated where there
        are fewer than devices, and the vocabulary is padded. ConfigError where heads or MLP cannot be divided."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        divided = [n for n in range(1, heads + 1) if heads % n == self.mlp_dim % n == 0]
        ways = [n for n in divided if n % kv_heads == 0 or kv_heads % n == 0]
        if devices not in ways:
            raise ConfigError(
                f"{heads} query heads, {kv_heads} key/value heads and {self.mlp_dim} features of the MLP cannot be "
                f"shared by {devices} devices: take {', '.join(map(str, ways))}"
            )
        added = padded_vocab(self.vocab_size, devices) - self.vocab_size
        return replace(self, vocab_size=self.vocab_size + added, added_vocab=added, num_kv_heads=max(kv_heads, devices))

    def local(self, devices: int) -> "ModelSpec":
        """What one of so many devices has of each layer. The vocabulary stays that of all."""
        return replace(
            self,
            num_heads=self.num_heads // devices,
            num_kv_heads=self.num_kv_heads // devices,
            mlp_dim=self.mlp_dim // devices,
            share=devices,
        )

    @property
    def weight_count(self) -> int:
        """Numbers in the matrices that a decode step reads, the output projection included."""
        return self.layer_count + self.vocab_size * self.embed_dim // self.share

    @property
    def layer_count(self) -> int:
        """Numbers in the matrices of all layers."""
        heads = self.num_heads + 2 * self.num_kv_heads + self.num_heads
        return self.num_layers * self.embed_dim * (heads * self.head_dim + 3 * self.mlp_dim)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head (1 is MHA, `num_heads` is MQA)."""
        return self.num_heads // self.num_kv_heads
