"""Trees with one fingerprint have one set of bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax import fingerprint
from logra_jax import sharding
from tests.support import normal
from tests.support import RNG


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_a_fingerprint_sees_every_single_bit(dtype):
  size = jnp.dtype(dtype).itemsize
  unsigned = jnp.dtype(f"uint{8 * size}")
  tree = {"a": normal(3), "w": (9 * normal(2, 3, 4)).astype(dtype)}
  of = jax.jit(fingerprint.fingerprint)
  seen = {int(of(tree))}
  raw = np.array(jax.lax.bitcast_convert_type(tree["w"], unsigned))
  at = tuple(RNG.integers(raw.shape))
  for bit in range(8 * size):
    flipped = raw.copy()
    flipped[at] ^= unsigned.type(1 << bit)
    seen.add(int(of(tree | {"w": jax.lax.bitcast_convert_type(
        jnp.asarray(flipped), dtype)})))
  assert len(seen) == 8 * size + 1


def test_a_fingerprint_sees_swapped_elements_rows_and_leaves():
  a, b = jnp.asarray(normal(4, 5)), jnp.asarray(normal(4, 5))
  swap = lambda x, i, j: x.at[i].set(x[j]).at[j].set(x[i])
  trees = [
      (a, b), (swap(a, (1, 2), (3, 0)), b), (swap(a, (0, 0), (0, 1)), b),
      (swap(a, 1, 2), b), (b, a),
      (a.at[0, 0].set(b[0, 0]), b.at[0, 0].set(a[0, 0])),
      (a.reshape(5, 4).T, b)]
  assert len({int(fingerprint.fingerprint(t)) for t in trees}) == len(trees)


def test_a_fingerprint_sees_a_swap_between_large_leaves():
  size = 1 << 20
  a, b = jnp.zeros(size + 2), jnp.zeros(size + 2)
  swapped = (a.at[size].set(1.0), b), (a, b.at[0].set(1.0))
  of = jax.jit(fingerprint.fingerprint)
  assert int(of(swapped[0])) != int(of(swapped[1]))


def test_a_fingerprint_does_not_depend_on_the_mesh():
  params = {"q_proj": {"kernel": normal(3, 16, 8)},
            "norm": {"scale": normal(3)}}
  expected = int(jax.jit(fingerprint.fingerprint)(params))
  for sizes in ({"data": 4, "model": 2}, {"fsdp": 2, "model": 2, "data": 2}):
    mesh = sharding.make_mesh(sizes)
    placed = jax.device_put(params, sharding.named(
        sharding.param_specs(params, mesh), mesh))
    assert int(jax.jit(fingerprint.fingerprint)(placed)) == expected


def test_a_fingerprint_sees_keys_flags_and_counts():
  tree = {"key": jax.random.key(0), "flag": jnp.array(False),
          "count": jnp.int32(3)}
  others = [tree | change for change in (
      {"key": jax.random.key(1)}, {"flag": jnp.array(True)},
      {"count": jnp.int32(4)})]
  assert len({int(fingerprint.fingerprint(t)) for t in [tree, *others]}) == 4
