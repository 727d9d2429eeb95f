"""Laws of low-rank updates: merged in place, and safe from foreign hands."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import bases
from logra_jax import low_rank
from tests.support import normal
from tests.support import quick

RNG = np.random.default_rng()


merge = quick(logra_jax.apply_updates)
draw = quick(lambda update: update.basis)


def low(law, n, *factor_shape, decay=0.0):
  return logra_jax.LowRank(
      jnp.asarray(normal(*factor_shape)), jnp.float32(decay),
      jax.random.key(int(RNG.integers(2**31))), law, n)


def lifted(update):
  v, u = (np.asarray(x, np.float64) for x in (draw(update), update.factor))
  return v @ u


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_a_merge_is_the_decayed_weight_plus_v_u_of_every_layer(batch, decay):
  update = low(bases.rademacher, 7, *batch, 3, 5, decay=decay)
  w = normal(*batch, 7, 5)
  merged = merge({"w": w}, {"w": update})["w"]
  expected = (1 - decay) * np.asarray(w, np.float64) + lifted(update)
  np.testing.assert_allclose(merged, expected, rtol=0, atol=2e-6)


def test_layers_of_a_stack_merge_as_they_would_apart():
  update = low(bases.rademacher, 7, 2, 3, 5, decay=0.1)
  w = normal(2, 7, 5)
  merged = merge(w, update)
  for i in range(2):
    alone = update.replace(
        factor=update.factor[i], key=jax.random.fold_in(update.key, i))
    np.testing.assert_array_equal(
        merged[i], merge(w[i], alone))


@pytest.mark.parametrize("shape, batch, n", [
    ((7, 2, 3), (), 7), ((2, 4, 5), (), 8), ((3, 2, 4, 5), (3,), 8)])
def test_head_split_weights_keep_their_shape(shape, batch, n):
  update = low(bases.rademacher, n, *batch, 3,
               int(np.prod(shape)) // n // int(np.prod(batch)))
  w = normal(*shape)
  merged = merge(w, update)
  assert merged.shape == shape
  expected = w.reshape(lifted(update).shape) + lifted(update)
  np.testing.assert_allclose(
      merged.reshape(expected.shape), expected, rtol=0, atol=2e-6)


def test_a_merge_keeps_the_weights_dtype_and_rounds_once():
  update = low(bases.rademacher, 7, 3, 5, decay=0.1)
  w = jnp.asarray(normal(7, 5), jnp.bfloat16)
  merged = merge(w, update)
  assert merged.dtype == jnp.bfloat16
  full = merge(w.astype(jnp.float32), update)
  np.testing.assert_array_equal(merged, full.astype(jnp.bfloat16))


def test_dense_and_absent_updates_are_merged_as_optax_does():
  params = {"a": normal(4), "b": jnp.ones(3, jnp.bfloat16), "c": normal(2),
            "d": None, "e": normal(2)}
  updates = {"a": normal(4), "b": jnp.full(3, 0.5), "c": None, "d": None,
             "e": optax.MaskedNode()}
  merged = merge(params, updates)
  np.testing.assert_array_equal(merged["a"], params["a"] + updates["a"])
  assert merged["b"].dtype == jnp.bfloat16 and merged["d"] is None
  np.testing.assert_array_equal(merged["c"], params["c"])
  np.testing.assert_array_equal(merged["e"], params["e"])


def test_a_donated_merge_holds_no_second_copy_of_the_weights():
  layers, n, r = 16, 256, 8
  update = low(bases.rademacher, n, layers, r, n)
  w = jax.ShapeDtypeStruct((layers, n, n), jnp.float32)
  merge = jax.jit(logra_jax.apply_updates, donate_argnums=0)
  memory = merge.lower({"w": w}, {"w": update}).compile().memory_analysis()
  weights = 4 * layers * n * n
  assert memory.alias_size_in_bytes == weights
  # Two layers' worth: V U and the new weight.
  assert memory.temp_size_in_bytes < weights / 4
  params = {"w": jnp.zeros((layers, n, n))}
  merged = merge(params, {"w": update})
  assert params["w"].is_deleted()
  np.testing.assert_allclose(merged["w"], lifted(update), rtol=0, atol=3e-5)


# Arithmetic.


@pytest.mark.parametrize("law", [
    bases.coordinate, bases.stiefel, bases.rademacher, bases.gaussian])
def test_the_squared_norm_is_that_of_the_lifted_update(law):
  update = low(law, 12, 2, 3, 5)
  found = quick(low_rank.squared_norm)(update)
  np.testing.assert_allclose(
      found, np.square(lifted(update)).sum(), rtol=1e-5)


def test_scaling_scales_the_factor_and_the_decay():
  update = low(bases.rademacher, 7, 3, 5, decay=0.5)
  tree = {"w": update, "b": jnp.ones(2, jnp.bfloat16), "gone": None}
  scaled = low_rank.scale(tree, jnp.float32(0.5))
  np.testing.assert_array_equal(scaled["w"].factor, update.factor * 0.5)
  assert float(scaled["w"].decay) == 0.25 and scaled["w"].key == update.key
  assert scaled["b"].dtype == jnp.bfloat16 and scaled["gone"] is None


FOREIGN = {
    "scale": optax.scale(0.5),
    "learning rate": optax.scale_by_learning_rate(0.1),
    "schedule": optax.scale_by_schedule(lambda count: 0.5),
    "clip": optax.clip(1.0),
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "adam": optax.scale_by_adam(),
    "trace": optax.trace(0.9),
    "decay": optax.add_decayed_weights(0.1),
    "sign": optax.scale_by_sign(),
    "trust_ratio": optax.scale_by_trust_ratio(),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_foreign_transform_raises_on_a_low_rank_update(name, compiled):
  params, tx = {"w": normal(7, 5)}, FOREIGN[name]
  updates, state = {"w": low(bases.rademacher, 7, 3, 5)}, tx.init(params)
  update = jax.jit(tx.update) if compiled else tx.update
  with pytest.raises((TypeError, ValueError, NotImplementedError)):
    update(updates, state, params)


@pytest.mark.parametrize("foreign", [
    optax.apply_updates, optax.tree.add,
    lambda params, updates: optax.tree.scale(2.0, updates),
    lambda params, updates: optax.tree.add(updates, updates),
    lambda params, updates: optax.tree.norm(updates)])
def test_foreign_tree_arithmetic_raises_on_a_low_rank_update(foreign):
  params, updates = {"w": normal(7, 5)}, {"w": low(bases.rademacher, 7, 3, 5)}
  with pytest.raises((TypeError, ValueError, NotImplementedError)):
    foreign(params, updates)


@pytest.mark.parametrize("tx", [
    optax.clip_by_global_norm(0.1), optax.scale(0.5), optax.clip(0.1)])
def test_a_sketch_is_arithmetic_as_its_array_is(tx):
  s = normal(3, 5)
  found, _ = tx.update({"w": logra_jax.Sketch(s)}, tx.init(None))
  expected, _ = tx.update({"w": s}, tx.init(None))
  assert isinstance(found["w"], logra_jax.Sketch)
  np.testing.assert_array_equal(found["w"].value, expected["w"])


def test_both_leaf_types_pass_through_jit_and_tree_maps():
  tree = {"u": low(bases.coordinate, 7, 3, 5), "s": logra_jax.Sketch(normal(2))}
  found = jax.jit(lambda t: jax.tree.map(lambda x: x, t))(tree)
  assert found["u"].law is bases.coordinate and found["u"].n == 7
  np.testing.assert_array_equal(found["u"].basis, tree["u"].basis)
  np.testing.assert_array_equal(found["s"].value, tree["s"].value)
