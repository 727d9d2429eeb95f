"""Laws of predicted and realised KL, and of the step scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logra_jax
from logra_jax import bases
from logra_jax import low_rank
from logra_jax import step_control

RNG = np.random.default_rng()


def normal(*shape, scale=1.0):
  return (scale * RNG.standard_normal(shape)).astype(np.float32)


def probabilities(logits, temperature):
  z = np.asarray(logits, np.float64) / temperature
  weight = np.exp(z - z.max(-1, keepdims=True))
  return weight / weight.sum(-1, keepdims=True)


def reference_predicted(logits, tangents, mask, temperature):
  p = probabilities(logits, temperature)
  change = np.asarray(tangents, np.float64) / temperature
  centred = change - (p * change).sum(-1, keepdims=True)
  kl = 0.5 * (p * centred ** 2).sum(-1)
  return kl[np.asarray(mask, bool)].mean()


def reference_realised(old, new, mask, temperature):
  p, q = (probabilities(z, temperature) for z in (old, new))
  kl = (p * np.log(p / q)).sum(-1)
  return kl[np.asarray(mask, bool)].mean()


def random_mask(*shape):
  mask = RNG.random(shape) < 0.6
  mask.flat[0] = True
  return mask


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_predicted_kl_is_half_the_variance_of_the_change(temperature):
  z, dz = normal(3, 5, 11, scale=2.0), normal(3, 5, 11, scale=0.1)
  mask = random_mask(3, 5)
  found = step_control.predicted_kl(z, dz, mask, temperature)
  expected = reference_predicted(z, dz, mask, temperature)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_common_offset_of_the_change_leaves_predicted_kl_alone():
  z = normal(40, 13)
  dz = normal(40, 13, scale=0.01) + np.float32(1e3)
  mask = np.ones(40)
  found = float(step_control.predicted_kl(z, dz, mask))
  expected = reference_predicted(z, dz, mask, 1.0)
  np.testing.assert_allclose(found, expected, rtol=2e-3)
  # E[dz^2] - E[dz]^2 in float32 is off by orders of magnitude here, so the
  # law above would see it.
  p = jax.nn.softmax(jnp.asarray(z))
  uncentred = 0.5 * jnp.mean(
      jnp.sum(p * dz ** 2, -1) - jnp.square(jnp.sum(p * dz, -1)))
  assert abs(float(uncentred) - expected) > expected


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("size", [1e-3, 0.3])
def test_realised_kl_is_the_kl_of_whole_distributions(size, temperature):
  old = normal(40, 13, scale=2.0)
  new = old + normal(40, 13, scale=size)
  mask = random_mask(40)
  found = float(step_control.realised_kl(old, new, mask, temperature))
  expected = reference_realised(old, new, mask, temperature)
  if size == 1e-3:
    assert 1e-8 < expected < 1e-5  # the scale at which a plain sum drowns
  np.testing.assert_allclose(found, expected, rtol=2e-3)


def test_realised_kl_is_never_negative():
  for size in (0.0, 1e-7, 1e-6, 1e-5, 1e-4):
    old = normal(200, 17, scale=5.0)
    new = old + normal(200, 17, scale=size)
    one_by_one = jax.vmap(
        lambda a, b: step_control.realised_kl(a, b, jnp.ones([])))(old, new)
    assert float(jnp.min(one_by_one)) >= 0.0


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_prediction_and_realisation_agree_on_small_steps(temperature):
  z, dz = normal(64, 9), normal(64, 9, scale=3e-3)
  mask = random_mask(64)
  predicted = step_control.predicted_kl(z, dz, mask, temperature)
  realised = step_control.realised_kl(z, z + dz, mask, temperature)
  np.testing.assert_allclose(predicted, realised, rtol=5e-3)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_masked_positions_do_not_count_whatever_they_hold(dtype):
  z, dz = normal(6, 5), normal(6, 5)
  mask = np.array([1, 0, 1, 1, 0, 0], dtype)
  bad_z, bad_dz = z.copy(), dz.copy()
  bad_z[1], bad_dz[4] = np.nan, np.inf
  for kl, (good, bad) in (
      (step_control.predicted_kl, ((z, dz), (bad_z, bad_dz))),
      (step_control.realised_kl, ((z, z + dz), (bad_z, z + bad_dz)))):
    assert float(kl(*bad, mask)) == float(kl(*good, mask)) > 0
    kept = mask.astype(bool)
    np.testing.assert_allclose(
        kl(*good, mask), kl(*(x[kept] for x in good), np.ones(3)), rtol=1e-6)


def test_no_valid_position_gives_nan():
  z = normal(4, 5)
  assert np.isnan(step_control.predicted_kl(z, z, np.zeros(4, bool)))
  assert np.isnan(step_control.realised_kl(z, z, np.zeros(4, bool)))


def test_bfloat16_logits_are_measured_in_float32():
  z, dz = (jnp.asarray(normal(8, 7), jnp.bfloat16) for _ in range(2))
  mask = np.ones(8)
  found = step_control.predicted_kl(z, dz, mask)
  assert found.dtype == jnp.float32
  expected = reference_predicted(
      z.astype(jnp.float32), dz.astype(jnp.float32), mask, 1.0)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def step_of(predicted, budget=1e-4, max_scale=3.0, updates=None):
  tx = logra_jax.scale_by_predicted_kl(budget, max_scale)
  updates = {"w": jnp.asarray(normal(3))} if updates is None else updates
  scaled, state = tx.update(
      updates, tx.init(updates), predict_kl=lambda u: predicted)
  return updates, scaled, state


@pytest.mark.parametrize("predicted, max_scale, scale", [
    (4e-4, 3.0, 0.5),
    (1e-4, 3.0, 1.0),
    (2.5e-5, 3.0, 2.0),  # steps grow too
    (1e-8, 3.0, 3.0),
    (1e-8, 0.25, 0.25),
    (2e-38, 3.0, 3.0),  # close to the least normal number
    (0.0, 3.0, 1.0),
    (0.0, 0.25, 0.25),
])
def test_step_scale_is_the_root_of_budget_over_prediction(
    predicted, max_scale, scale):
  updates, scaled, state = step_of(predicted, max_scale=max_scale)
  np.testing.assert_allclose(state.step_scale, scale, rtol=1e-6)
  np.testing.assert_allclose(scaled["w"], scale * updates["w"], rtol=1e-6)
  np.testing.assert_allclose(state.predicted_kl, np.float32(predicted))
  np.testing.assert_allclose(state.kl_budget, 1e-4, rtol=1e-6)


@pytest.mark.parametrize("predicted", [np.nan, np.inf, -np.inf, -1e-6])
def test_a_prediction_that_cannot_be_trusted_gives_a_step_of_zero(predicted):
  w = jnp.array([1.0, -2.0, jnp.nan, jnp.inf])
  node = low_rank.LowRank(
      jnp.full((2, 3), jnp.nan), jnp.float32(0.5), jax.random.key(0),
      bases.rademacher, 4)
  _, scaled, state = step_of(predicted, updates={"w": w, "k": node})
  assert float(state.step_scale) == 0.0
  assert scaled["w"].tolist() == [0.0] * 4
  assert not np.any(scaled["k"].factor) and float(scaled["k"].decay) == 0.0


def test_budget_schedule_counts_updates():
  budget = lambda count: 1e-4 * (1.0 + count)
  tx = logra_jax.scale_by_predicted_kl(budget)
  u = jnp.ones(2)
  state = tx.init(u)
  for i in range(3):
    scaled, state = tx.update(u, state, predict_kl=lambda u: 4e-4)
    alpha = 0.5 * np.sqrt(1.0 + i)
    np.testing.assert_allclose(state.step_scale, alpha, rtol=1e-6)
    np.testing.assert_allclose(state.kl_budget, 1e-4 * (1 + i), rtol=1e-6)
    np.testing.assert_allclose(scaled, alpha * u, rtol=1e-6)
    assert int(state.count) == i + 1


def test_scaled_quadratic_prediction_meets_the_budget():
  root = normal(12, 12)
  quadratic = lambda u: 0.5 * jnp.sum(jnp.square(root @ u))
  u = jnp.asarray(normal(12))
  tx = logra_jax.scale_by_predicted_kl(2e-4)
  scaled, state = tx.update(u, tx.init(u), predict_kl=quadratic)
  assert 0.0 < float(state.step_scale) < 3.0
  np.testing.assert_allclose(quadratic(scaled), 2e-4, rtol=1e-5)


def test_low_rank_updates_are_scaled_in_factor_and_decay():
  factor = jnp.asarray(normal(2, 3, 5), jnp.bfloat16)
  node = low_rank.LowRank(
      factor, jnp.float32(0.25), jax.random.key(3), bases.hadamard, 8)
  dense = jnp.asarray(normal(4), jnp.bfloat16)
  updates, scaled, _ = step_of(
      4e-4, updates={"k": node, "b": dense, "none": None})
  assert isinstance(scaled["k"], low_rank.LowRank)
  assert (scaled["k"].factor == 0.5 * factor).all()
  assert float(scaled["k"].decay) == 0.125
  assert bool(scaled["k"].key == node.key)
  assert (scaled["k"].law, scaled["k"].n) == (bases.hadamard, 8)
  assert (scaled["b"] == 0.5 * dense).all() and scaled["none"] is None
  dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
  assert dtypes(scaled) == dtypes(updates)


def test_predict_kl_sees_the_unscaled_updates_and_other_extras_pass():
  u = jnp.asarray(normal(3))
  tx = logra_jax.scale_by_predicted_kl(1e-4)
  seen = []
  tx.update(u, tx.init(u), predict_kl=lambda x: seen.append(x) or 1.0,
            value=3.0)
  assert (seen[0] == u).all()
  with pytest.raises(TypeError, match="predict_kl"):
    tx.update(u, tx.init(u))


def test_state_keeps_its_dtypes_and_does_not_recompile():
  u = jnp.ones(3, jnp.bfloat16)
  tx = logra_jax.scale_by_predicted_kl(lambda count: 1e-4)
  state = tx.init(u)
  step = jax.jit(lambda u, s, k: tx.update(u, s, predict_kl=lambda _: k))
  types = jax.tree.map(lambda x: (x.shape, x.dtype), state)
  for predicted in (1e-4, np.nan, 1e-3):
    u, state = step(u, state, predicted)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == types
    assert u.dtype == jnp.bfloat16
  assert step._cache_size() == 1


@pytest.mark.parametrize("budget", [0.0, -1e-4, float("nan")])
def test_a_budget_that_is_not_positive_is_refused(budget):
  with pytest.raises(ValueError, match=f"kl_budget {budget}.*choose"):
    logra_jax.scale_by_predicted_kl(budget)


@pytest.mark.parametrize("max_scale", [0.0, -1.0, float("nan")])
def test_a_scale_bound_that_is_not_positive_is_refused(max_scale):
  with pytest.raises(ValueError, match=f"max_scale {max_scale}.*choose"):
    logra_jax.scale_by_predicted_kl(1e-4, max_scale)
