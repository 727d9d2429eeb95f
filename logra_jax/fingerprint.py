"""One number for every bit of a tree: two trees that share it are the same."""

from typing import Any

import jax
import jax.numpy as jnp


def fingerprint(tree: Any) -> jax.Array:
  """A hash of every bit of a tree of arrays. -> [] uint32.

  Bits are weighted by a hash of their position and added modulo 2^32, which is
  exact in any order: meshes do not matter.

  Args:
    tree: arrays of 1, 2 or 4 bytes an element, or typed PRNG keys.

  Returns:
    The hash.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import fingerprint
    >>> w = jnp.ones(4)
    >>> a, b = map(fingerprint.fingerprint, (w, w.at[2].add(1e-7)))
    >>> bool(a == b)
    False
  """
  total = jnp.zeros([], jnp.uint32)
  for index, leaf in enumerate(jax.tree.leaves(tree)):
    bits = _bits(leaf)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
      position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(
          jnp.uint32, bits.shape, axis)
    # Mixed before the leaf's number comes in, or position p of one large leaf
    # would weigh as much as some position of the next.
    weight = _mix(_mix(position) ^ jnp.uint32(index + 1))
    total += jnp.sum(_mix(bits ^ weight))
  return total


def _bits(leaf):
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(leaf)
  if leaf.dtype == bool:
    return leaf.astype(jnp.uint32)
  unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
  return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _mix(x):
  """Murmur3's finaliser: every input bit reaches every output bit."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
