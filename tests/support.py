"""What several test files need."""

import jax
import numpy as np

RNG = np.random.default_rng()


def normal(*shape):
  return RNG.standard_normal(shape).astype(np.float32)


def like(tree):
  return jax.tree.map(lambda x: normal(*x.shape), tree)


def bits(tree):
  """A tree whose keys are numbers that NumPy can compare."""
  is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.tree.map(
      lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def equal(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, bits(found), bits(expected))


def quick(function, **kwargs):
  """`jax.jit`, three times faster to compile."""
  return jax.jit(
      function, compiler_options={"xla_backend_optimization_level": 0},
      **kwargs)
