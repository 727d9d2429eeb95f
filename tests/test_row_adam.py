"""Laws of RowAdam and of the step that is a share of the weights' norm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import bases
from tests.support import normal
from tests.support import quick

RNG = np.random.default_rng()
TINY = float(np.finfo(np.float32).tiny)
FORMS = [False, True]


def row_adam(**kwargs):
  tx = logra_jax.scale_by_row_adam(**kwargs)
  return optax.GradientTransformationExtraArgs(tx.init, quick(tx.update))


class Reference:
  """RowAdam of one matrix [rows, n_out] in float64, written from the paper."""

  def __init__(self, restore_norm, b2=0.95, eps=1e-8):
    self.restore_norm, self.b2, self.eps = restore_norm, b2, eps
    self.v, self.count = 0.0, 0

  def step(self, s):
    s = np.asarray(s, np.float64)
    self.count += 1
    self.v = self.b2 * self.v + (1 - self.b2) * np.mean(s**2, 0)
    root = np.sqrt(self.v / (1 - self.b2**self.count))
    if not self.restore_norm:
      return s / (root + self.eps)
    d = s / (root + max(self.eps * root.mean(), TINY))
    return d * np.linalg.norm(s) / max(np.linalg.norm(d), TINY)


@pytest.mark.parametrize("restore_norm", FORMS)
@pytest.mark.parametrize("b2, eps", [(0.95, 1e-8), (0.5, 0.1), (0.0, 0.0)])
def test_both_forms_are_the_papers_formulas(restore_norm, b2, eps):
  tx = row_adam(b2=b2, eps=eps, restore_norm=restore_norm)
  reference = Reference(restore_norm, b2, eps)
  # Outputs of very different sizes, as RowAdam is for.
  sizes = np.float32([1e-6, 1e-2, 1.0, 30.0])
  state = tx.init(normal(6, 4))
  for _ in range(4):
    s = normal(6, 4) * sizes
    found, state = tx.update(s, state)
    np.testing.assert_allclose(found, reference.step(s), rtol=3e-5)
  np.testing.assert_allclose(state.nu_per_output[0], reference.v, rtol=3e-5)
  assert int(state.count) == 4


@pytest.mark.parametrize("restore_norm", FORMS)
@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_stacked_layers_are_layers_apart(restore_norm, batch):
  tx = row_adam(restore_norm=restore_norm)
  references = {i: Reference(restore_norm) for i in np.ndindex(batch)}
  sizes = 10.0 ** RNG.integers(-3, 3, size=(*batch, 1, 4)).astype(np.float32)
  state = tx.init(normal(*batch, 6, 4))
  assert state.nu_per_output.shape == (*batch, 1, 4)
  for _ in range(3):
    s = normal(*batch, 6, 4) * sizes
    found, state = tx.update(s, state)
    for i, reference in references.items():
      np.testing.assert_allclose(found[i], reference.step(s[i]), rtol=3e-5)


@pytest.mark.parametrize("restore_norm", FORMS)
def test_a_vector_is_its_own_output_axis(restore_norm):
  tx, reference = row_adam(restore_norm=restore_norm), Reference(restore_norm)
  state = tx.init(normal(5))
  for _ in range(3):
    s = normal(5)
    found, state = tx.update(s, state)
    np.testing.assert_allclose(found, reference.step(s[None])[0], rtol=3e-5)


def test_the_first_step_has_unit_mean_square_in_every_output():
  tx = row_adam()
  s = normal(6, 4) * np.float32([1e-5, 1e-2, 1.0, 1e4])
  found, _ = tx.update(s, tx.init(s))
  np.testing.assert_allclose(np.mean(found**2, 0), 1.0, rtol=5e-3)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_restored_layers_keep_their_own_norm_whatever_the_scale(scale):
  tx = row_adam(restore_norm=True)
  state = tx.init(normal(2, 6, 4))
  for _ in range(3):
    s = normal(2, 6, 4) * np.float32([[[1.0]], [[7.0]]]) * np.float32(scale)
    found, state = tx.update(s, state)
    norm = lambda x: np.linalg.norm(np.asarray(x, np.float64), axis=(-2, -1))
    np.testing.assert_allclose(norm(found), norm(s), rtol=1e-5)


@pytest.mark.parametrize("restore_norm", FORMS)
def test_an_all_zero_matrix_stays_zero_beside_others(restore_norm):
  tx = row_adam(restore_norm=restore_norm)
  s = np.stack([np.zeros((6, 4), np.float32), normal(6, 4)])
  s[1, :, 2] = 0.0  # an output of its own that never had a gradient
  state = tx.init(s)
  for _ in range(2):
    found, state = tx.update(s, state)
    np.testing.assert_array_equal(found[0], 0.0)
    np.testing.assert_array_equal(found[1, :, 2], 0.0)
    assert np.isfinite(found).all() and np.abs(found[1]).max() > 0


@pytest.mark.parametrize("restore_norm", FORMS)
@pytest.mark.parametrize("at_first", [False, True])
def test_a_step_of_zero_gradients_does_not_shrink_later_steps(
    restore_norm, at_first):
  tx = row_adam(restore_norm=restore_norm)
  s, zero = normal(6, 4), np.zeros((6, 4), np.float32)
  history = [zero] * 3 if at_first else [s] * 3 + [zero] * 3
  state, plain = tx.init(s), tx.init(s)
  for _ in range(3):
    expected, plain = tx.update(s, plain)
  for gradient in history:
    _, state = tx.update(gradient, state)
  for _ in range(3):
    found, state = tx.update(s, state)
    assert (np.abs(found) >= np.abs(expected) * (1 - 1e-5)).all()


@pytest.mark.parametrize("carry", ["keep", "reset", "rotate"])
def test_the_count_and_the_moments_outlive_every_refresh(carry):
  tx = logra_jax.sketched(
      logra_jax.scale_by_row_adam(), rank=3, basis=bases.rademacher,
      carry=carry)
  update, w = quick(tx.update), normal(7, 4)
  state, reference = quick(tx.init)(w), Reference(False)
  for i in range(3):
    g, v = normal(7, 4), np.asarray(state.basis, np.float64)
    found, state = update(g, state, w)
    expected = v @ reference.step(v.T @ g)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert int(state.inner.sketched.count) == i + 1


@pytest.mark.parametrize("restore_norm", FORMS)
def test_leaf_dtypes_stay_and_the_state_is_float32(restore_norm):
  tx = row_adam(restore_norm=restore_norm)
  s = jnp.asarray(normal(6, 4), jnp.bfloat16)
  state = tx.init(s)
  found, state = tx.update(s, state)
  assert found.dtype == jnp.bfloat16
  assert state.nu_per_output.dtype == jnp.float32
  full, _ = tx.update(s.astype(jnp.float32), tx.init(s.astype(jnp.float32)))
  np.testing.assert_array_equal(found, full.astype(jnp.bfloat16))


@pytest.mark.parametrize("kwargs, message", [
    ({"b2": 1.0}, "b2 1.0 .*b2 < 1"), ({"b2": -0.1}, "b2 -0.1 "),
    ({"b2": float("nan")}, "b2 nan "), ({"eps": -1e-8}, "eps -1e-08 "),
])
def test_an_impossible_argument_is_an_error_that_names_it(kwargs, message):
  with pytest.raises(ValueError, match=message):
    logra_jax.scale_by_row_adam(**kwargs)


def test_the_default_b2_stays_finite_when_bfloat16_parameters_round_it():
  tx = optax.inject_hyperparams(logra_jax.scale_by_row_adam)()
  s = jnp.asarray(normal(6, 4), jnp.bfloat16)
  state, update = tx.init(s), quick(tx.update)
  for _ in range(3):
    found, state = update(s, state, s)
    assert found.dtype == jnp.bfloat16 and jnp.isfinite(found).all()
    # Equal gradients: every output has unit mean square at every step.
    mean_square = np.mean(np.square(np.asarray(found, np.float32)), 0)
    np.testing.assert_allclose(mean_square, 1.0, atol=0.05)


def test_a_b2_that_bfloat16_rounds_to_1_is_an_error_and_not_nan():
  tx = optax.inject_hyperparams(logra_jax.scale_by_row_adam)(b2=0.999)
  with pytest.raises(ValueError, match="b2 1"):
    tx.init(jnp.zeros((6, 4), jnp.bfloat16))


# The step as a share of the weights.


def lifted(update):
  """An update of optax's kind, float64."""
  if isinstance(update, logra_jax.LowRank):
    v, u = (np.asarray(x, np.float64) for x in (update.basis, update.factor))
    return v @ u
  return np.asarray(update, np.float64)


def total_norm(arrays):
  return np.sqrt(sum(np.sum(np.asarray(x, np.float64)**2) for x in arrays))


@pytest.mark.parametrize("law", [None, bases.coordinate, bases.gaussian])
def test_one_factor_sets_the_whole_step_to_its_share(law):
  params = {"w": 3 * normal(2, 12, 5), "b": normal(5)}
  updates = {"w": normal(2, 12, 5), "b": normal(5)}
  if law is not None:
    updates["w"] = logra_jax.LowRank(
        jnp.asarray(normal(2, 3, 5)), jnp.float32(0.0),
        jax.random.key(int(RNG.integers(2**31))), law, 12)
  tx = logra_jax.scale_to_weight_ratio(0.01)
  found, _ = quick(tx.update)(updates, tx.init(params), params)
  before = {k: lifted(u) for k, u in updates.items()}
  factor = -0.01 * total_norm(params.values()) / total_norm(before.values())
  for name, update in found.items():
    low_rank = isinstance(updates[name], logra_jax.LowRank)
    assert isinstance(update, logra_jax.LowRank) == low_rank
    expected = factor * before[name]
    np.testing.assert_allclose(
        lifted(update), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_the_published_share_is_the_default():
  w = normal(7, 5)
  tx = logra_jax.scale_to_weight_ratio()
  found, _ = tx.update(normal(7, 5), tx.init(w), w)
  np.testing.assert_allclose(
      total_norm([found]), 6e-5 * total_norm([w]), rtol=1e-5)


def test_a_zero_update_stays_zero_and_a_tiny_one_is_a_full_step():
  params = {"w": normal(7, 5), "b": normal(5)}
  tx = logra_jax.scale_to_weight_ratio(0.01)
  zero = jax.tree.map(jnp.zeros_like, params)
  found, _ = tx.update(zero, tx.init(params), params)
  np.testing.assert_array_equal(found["w"], 0.0)
  tiny = jax.tree.map(lambda x: 1e-15 * x, params)
  found, _ = tx.update(tiny, tx.init(params), params)
  np.testing.assert_allclose(found["w"], -0.01 * params["w"], rtol=1e-4)


def test_without_weights_the_share_is_an_error_that_says_what_to_do():
  tx = logra_jax.scale_to_weight_ratio()
  with pytest.raises(ValueError, match="params.*after sketched"):
    tx.update(normal(2), tx.init(normal(2)))


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan")])
def test_a_share_that_is_not_positive_is_refused(ratio):
  with pytest.raises(ValueError, match=f"ratio {ratio} is not positive"):
    logra_jax.scale_to_weight_ratio(ratio)
