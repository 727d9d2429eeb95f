"""Keys and values of the tokens seen so far."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from logra_jax.models import config as config_lib


class KVCache(NamedTuple):
  """One slot a token; which slots hold real tokens is the caller's mask."""
  k: jax.Array  # [layers, batch, slots, kv_heads, head_dim]
  v: jax.Array  # [layers, batch, slots, kv_heads, head_dim]


def init(
    config: config_lib.DecoderConfig, batch: int, slots: int
) -> KVCache:
  """An empty cache. [layers, batch, slots, kv_heads, head_dim].

  Args:
    config: the decoder's.
    batch: rows.
    slots: prompt and completion tokens together.

  Returns:
    Zeros in the activation dtype.
  """
  shape = (config.num_layers, batch, slots, config.num_kv_heads,
           config.head_dim)
  return KVCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))


def write(
    buffer: jax.Array, new: jax.Array, start: jax.Array | int
) -> jax.Array:
  """Puts [batch, tokens, ...] at slots start.. of [batch, slots, ...]."""
  return jax.lax.dynamic_update_slice_in_dim(
      buffer, new.astype(buffer.dtype), start, axis=1)
