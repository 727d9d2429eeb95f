"""Laws of the random bases: unbiased, of the stated error, the same anywhere.

Monte Carlo checks allow six standard errors of the draws at hand.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import logra_jax
from logra_jax import bases
from tests.support import quick

RNG = np.random.default_rng()
LAWS = [bases.stiefel, bases.coordinate, bases.hadamard, bases.rademacher,
        bases.gaussian]
ORTHONORMAL = LAWS[:3]
# No order of a sum can change the bits of these.
EXACT = [bases.hadamard, bases.coordinate, bases.rademacher]
KAPPA = {
    bases.stiefel: lambda n, r: n / r,
    bases.coordinate: lambda n, r: n / r,
    bases.hadamard: lambda n, r: n / r,
    bases.rademacher: lambda n, r: (n + r - 1) / r,
    bases.gaussian: lambda n, r: (n + r + 1) / r,
}
by_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)


def fresh_key():
  return jax.random.key(int(RNG.integers(2**31)))


@functools.cache
def draws(law, n, r, number):
  """[number, n, r] independent bases, float64."""
  draw = quick(lambda key: law(key, n, r, batch=(number,)))
  return np.asarray(draw(fresh_key()), np.float64)


def assert_mean(samples, expected):
  """The mean of samples [number, ...] is as expected, to six errors."""
  error = samples.std(0) / math.sqrt(len(samples))
  # 2e-6: rounding of an entry that is the same in every draw.
  excess = np.abs(samples.mean(0) - expected) - 6 * error - 2e-6
  assert excess.max() <= 0, (samples.mean(0), expected, error)


@by_law
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_basis_has_the_shape_and_dtype_asked_for(law, batch, dtype):
  draw = lambda key: law(key, 12, 4, dtype, batch)
  found = jax.eval_shape(draw, jax.random.key(0))
  assert (found.shape, found.dtype) == ((*batch, 12, 4), dtype)


@by_law
@pytest.mark.parametrize("rank", [-1, 0, 13])
def test_a_rank_out_of_1_to_n_is_an_error_that_says_so(law, rank):
  with pytest.raises(ValueError, match=rf"rank {rank} .* 1 <= rank <= 12"):
    law(jax.random.key(0), 12, rank)


def test_a_bfloat16_basis_is_the_float32_basis_rounded():
  full, short = quick(lambda key: (
      bases.gaussian(key, 12, 5), bases.gaussian(key, 12, 5, jnp.bfloat16)))(
          fresh_key())
  np.testing.assert_array_equal(short, full.astype(jnp.bfloat16))


@by_law
@pytest.mark.parametrize("n, r", [(12, 5), (14, 9)])
def test_the_mean_of_v_v_transposed_is_the_identity(law, n, r):
  v = draws(law, n, r, 4000)
  assert_mean(v @ v.swapaxes(-1, -2), np.eye(n))


@by_law
@pytest.mark.parametrize("n, r", [(12, 5), (14, 9)])
def test_the_error_of_a_lifted_sketch_is_kappa_minus_one(law, n, r):
  v = draws(law, n, r, 4000)
  g = RNG.standard_normal((n, 2))
  error = v @ (v.swapaxes(-1, -2) @ g) - g
  found = np.square(error).sum((-2, -1)) / np.square(g).sum()
  assert_mean(found, KAPPA[law](n, r) - 1)


@pytest.mark.parametrize("law, n, r", [
    (bases.stiefel, 48, 12), (bases.stiefel, 37, 19), (bases.stiefel, 1, 1),
    (bases.coordinate, 48, 12), (bases.hadamard, 48, 8),
    (bases.hadamard, 96, 96), (bases.hadamard, 84, 50),
    (bases.hadamard, 37, 37)])
def test_columns_are_orthonormal_up_to_n_over_r(law, n, r):
  v = draws(law, n, r, 20)
  gram = v.swapaxes(-1, -2) @ v * (r / n)
  assert np.abs(gram - np.eye(r)).max() < 5e-6


def test_laws_without_orthonormal_columns_are_not_called_so():
  assert set(ORTHONORMAL) == bases.ORTHONORMAL
  for law in (bases.rademacher, bases.gaussian):
    v = draws(law, 12, 5, 4000)[0]
    assert np.abs(v.T @ v * (5 / 12) - np.eye(5)).max() > 1e-2


@pytest.mark.parametrize("n, r", [(48, 8), (96, 96), (84, 50), (37, 37)])
def test_hadamard_is_exact_up_to_one_constant(n, r):
  m = n // (n & -n)
  v = draws(bases.hadamard, n, r, 20)
  entries = np.rint(v / math.sqrt(m / r)).astype(int)
  assert set(np.unique(entries)) <= {-1, 0, 1}
  np.testing.assert_array_equal(v, entries * np.float32(math.sqrt(m / r)))
  grams = entries.swapaxes(-1, -2) @ entries
  np.testing.assert_array_equal(
      grams, np.broadcast_to((n // m) * np.eye(r, dtype=int), grams.shape))


@pytest.mark.parametrize("n, r", [(48, 8), (84, 50), (96, 96)])
def test_hadamard_columns_are_spread_evenly_over_residues(n, r):
  m = n // (n & -n)
  for v in draws(bases.hadamard, n, r, 20):
    # Columns of one residue share their rows, those of two have none in common.
    supports, counts = np.unique(v != 0, axis=1, return_counts=True)
    assert len(counts) == m and counts.max() - counts.min() == (r % m > 0)
    np.testing.assert_array_equal(supports.sum(1), 1)


def test_hadamard_rows_are_permuted_and_flipped():
  seen = set()
  for v in draws(bases.hadamard, 96, 96, 20):
    # Unflipped, the first column of each residue would have a single sign.
    assert (np.abs(np.sign(v).sum(0)) < (v != 0).sum(0)).all()
    seen.add(tuple(np.flatnonzero(v[0] * v[1])))
  # Unpermuted, the first two rows would never share a residue.
  assert 1 < len(seen)


@pytest.mark.parametrize("n, r", [(84, 20), (37, 19)])
def test_hadamard_is_stiefel_where_residues_outnumber_columns(n, r):
  both = quick(lambda key: (bases.hadamard(key, n, r),
                            bases.stiefel(key, n, r)))
  np.testing.assert_array_equal(*both(fresh_key()))


def test_a_coordinate_basis_picks_distinct_rows():
  for v in draws(bases.coordinate, 48, 12, 20):
    assert ((v != 0).sum(0) == 1).all() and ((v != 0).sum(1) <= 1).all()
    np.testing.assert_allclose(v.max(0), 2.0, rtol=1e-6)


@pytest.mark.parametrize("n, r", [(12, 5), (14, 9)])
def test_stiefel_columns_are_haar_in_both_branches(n, r):
  q = draws(bases.stiefel, n, r, 4000) * math.sqrt(r / n)
  # A QR whose signs are the library's has a mean that is not zero.
  assert_mean(q, np.zeros((n, r)))
  assert_mean(q**4, np.full((n, r), 3 / (n * (n + 2))))


@pytest.mark.parametrize("n, r", [(16, 16), (16, 8)])
def test_near_square_stiefel_bases_are_finite_and_orthonormal(n, r):
  v = draws(bases.stiefel, n, r, 2000)
  gram = v.swapaxes(-1, -2) @ v * (r / n)
  # One Cholesky pass squares the condition, which is worst at r = n/2.
  assert np.abs(gram - np.eye(r)).max() < (1e-5 if 2 * r > n else 1e-3)


@by_law
def test_elements_of_a_batch_are_draws_of_their_own_keys(law):
  fold = jax.random.fold_in
  stacked, separate = quick(lambda key: (
      law(key, 12, 5, batch=(2, 2)), law(fold(fold(key, 1), 0), 12, 5)))(
          fresh_key())
  tolerance = 0 if law in EXACT else 1e-6
  np.testing.assert_allclose(stacked[1, 0], separate, rtol=0, atol=tolerance)
  assert len(np.unique(np.asarray(stacked).reshape(4, -1), axis=0)) == 4


@pytest.mark.parametrize("law", [bases.stiefel, bases.hadamard])
def test_a_list_of_layers_and_a_stacked_model_draw_the_same_bases(law):
  tx = logra_jax.sketched(optax.identity(), rank=5, basis=law, seed=3)
  kernel = jnp.zeros((12, 3))
  listed, stacked = quick(lambda: (
      tx.init({"layers": [{"kernel": kernel}] * 2}).basis,
      tx.init({"layers": {"kernel": jnp.stack([kernel] * 2)}}).basis))()
  found = np.stack([layer["kernel"] for layer in listed["layers"]])
  np.testing.assert_allclose(
      found, stacked["layers"]["kernel"], rtol=0,
      atol=0 if law in EXACT else 1e-6)


@by_law
def test_a_sharded_draw_equals_one_device(law):
  mesh = jax.make_mesh(
      (4, 2), ("fsdp", "model"),
      axis_types=(jax.sharding.AxisType.Auto,) * 2)
  draw = lambda key: law(key, 48, 8, batch=(2,))
  key = fresh_key()
  sharding = jax.sharding.NamedSharding(mesh, P(None, "fsdp", "model"))
  sharded = quick(draw, out_shardings=sharding)(key)
  assert sharded.sharding.is_equivalent_to(sharding, 3)
  np.testing.assert_allclose(
      sharded, quick(draw)(key), rtol=0, atol=0 if law in EXACT else 1e-6)


@pytest.mark.parametrize("law", [bases.hadamard, bases.rademacher])
def test_how_a_draw_is_compiled_changes_no_bit(law):
  key = fresh_key()
  draw = lambda key: law(key, 12, 5)
  np.testing.assert_array_equal(quick(draw)(key), jax.jit(draw)(key))
