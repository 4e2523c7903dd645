"""What a decoder-only transformer is made of, as frozen switches that a compiled program may depend on."""

from dataclasses import dataclass


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

    @property
    def weight_count(self) -> int:
        """Numbers in the matrices that a decode step reads, the output projection included."""
        heads = self.num_heads + 2 * self.num_kv_heads + self.num_heads
        layer = self.embed_dim * (heads * self.head_dim + 3 * self.mlp_dim)
        return self.num_layers * layer + self.vocab_size * self.embed_dim

    @property
    def group(self) -> int:
        """Query heads that share one key/value head (1 is MHA, `num_heads` is MQA)."""
        return self.num_heads // self.num_kv_heads
