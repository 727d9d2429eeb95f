"""Keys of everything random, by names and numbers: none needs to be saved."""

import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def make(
    seed: int, purpose: str, step: jax.Array | int, worker: int = 0
) -> jax.Array:
  """The key of one random event. -> [] typed key.

  Args:
    seed: the run's.
    purpose: what the key is for; a different word is a different stream.
    step: of the run.
    worker: index of the drawer, where several share a seed.

  Returns:
    A key to fold further indices into.

  Example:
    >>> from logra_jax import keys
    >>> bool(keys.make(0, "sample", 3) == keys.make(0, "sample", 3, worker=1))
    False
  """
  key = fold_in_name(jax.random.key(seed), purpose)
  return jax.random.fold_in(jax.random.fold_in(key, worker), step)


def leaf_path(path: tuple) -> str:
  """Canonical name of a leaf: components joined by "/".

  Example:
    >>> import jax
    >>> from logra_jax import keys
    >>> tree = {"layers": [{"kernel": 1.0}]}
    >>> [keys.leaf_path(p) for p, _ in jax.tree.leaves_with_path(tree)]
    ['layers/0/kernel']
  """
  # An NNX State adds the Variable's own `.value` to every path.
  if path and path[-1] == jax.tree_util.GetAttrKey("value"):
    path = path[:-1]
  return jax.tree_util.keystr(path, simple=True, separator="/")


def fold_in_name(key: jax.Array, name: str) -> jax.Array:
  """Folds a word into a key by a fixed hash; Python's own is salted. [] -> []

  Example:
    >>> import jax
    >>> from logra_jax import keys
    >>> a, b = (keys.fold_in_name(jax.random.key(0), n) for n in "ab")
    >>> bool(a == b)
    False
  """
  digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
  return jax.random.fold_in(key, int.from_bytes(digest, "little"))


def leaf_key(key: jax.Array, refresh: jax.Array | int, path: str) -> jax.Array:
  """Key of a leaf's basis from (seed key, refresh index, leaf path). [] -> [].

  Numbers in the path (`layers/3/kernel`) are layer indices: they leave the name
  and are folded in last, as `batch_keys` folds a batch axis, so that an
  unstacked and a stacked model draw the same basis.

  Args:
    key: the seed's typed key.
    refresh: how many times the basis was redrawn.
    path: canonical leaf path, components joined by "/".

  Returns:
    A typed key.

  Example:
    >>> import jax
    >>> from logra_jax import keys
    >>> seed = jax.random.key(0)
    >>> stacked = keys.leaf_key(seed, 0, "layers/kernel")
    >>> bool(keys.leaf_key(seed, 0, "layers/3/kernel")
    ...      == jax.random.fold_in(stacked, 3))
    True
  """
  parts = path.split("/")
  name = "/".join(p for p in parts if not p.isdecimal())
  key = fold_in_name(jax.random.fold_in(key, refresh), name)
  for part in parts:
    if part.isdecimal():
      key = jax.random.fold_in(key, int(part))
  return key


def batch_keys(key: jax.Array, batch: Sequence[int]) -> jax.Array:
  """One key for each element of a batch, folded axis by axis. [*batch].

  Args:
    key: a scalar key.
    batch: sizes of the leading axes.

  Returns:
    Keys such that element (i, j) is `fold_in(fold_in(key, i), j)`.

  Example:
    >>> import jax
    >>> from logra_jax import keys
    >>> keys.batch_keys(jax.random.key(0), (2, 3)).shape
    (2, 3)
  """
  for size in batch:
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    fold_flat = jax.vmap(fold, in_axes=(0, None))
    keys = fold_flat(key.reshape(-1), jnp.arange(size))
    key = keys.reshape(*key.shape, size)
  return key
