"""The shape of a decoder."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes of a decoder-only transformer.

  Attributes:
    vocab_size: rows of the embedding.
    num_layers: blocks.
    embed_dim: width of the residual stream.
    num_heads: query heads.
    num_kv_heads: key and value heads, a divisor of num_heads.
    head_dim: width of a head, even.
    mlp_dim: hidden width of the gated MLP.
    rope_theta: base of the rotary wavelengths.
    norm_eps: of RMSNorm.
    tied_head: whether the output head is the embedding.
    remat: whether to recompute a block's activations in the backward pass.
    dtype: of activations.
    param_dtype: of weights.
  """
  vocab_size: int
  num_layers: int
  embed_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  tied_head: bool = True
  remat: bool = True
  dtype: jax.typing.DTypeLike = jnp.float32
  param_dtype: jax.typing.DTypeLike = jnp.float32

  def __post_init__(self):
    for field in ("vocab_size", "num_layers", "embed_dim", "num_heads",
                  "num_kv_heads", "head_dim", "mlp_dim"):
      if getattr(self, field) < 1:
        raise ValueError(f"model.{field} {getattr(self, field)} is below 1")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          f"model.num_heads {self.num_heads} is no multiple of"
          f" model.num_kv_heads {self.num_kv_heads}")
    if self.head_dim % 2:
      raise ValueError(
          f"model.head_dim {self.head_dim} is odd: rotary embeddings rotate"
          " pairs")
