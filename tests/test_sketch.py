"""Laws of `sketched`: what it computes, when it redraws, what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import bases
from logra_jax import keys
from logra_jax import sketch
from tests.support import equal
from tests.support import like
from tests.support import normal
from tests.support import quick


def f64(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def transposed(x):
  return np.swapaxes(x, -1, -2)


def close(found, expected, rtol=2e-5):
  for a, b in zip(
      jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


merge, add = quick(logra_jax.apply_updates), quick(optax.apply_updates)


def sketched(inner, rank=3, basis=bases.rademacher, **kwargs):
  """`logra_jax.sketched`, compiled, with a law that compiles quickly."""
  tx = logra_jax.sketched(inner, rank=rank, basis=basis, **kwargs)
  return optax.GradientTransformationExtraArgs(
      quick(tx.init), quick(tx.update))


def sketches_of(state, gradients):
  """V^T G as a `Sketch` where the state has a V."""
  def one(g, v):
    if v is None:
      return g
    v = np.asarray(v)
    return logra_jax.Sketch(transposed(v) @ g.reshape(*v.shape[:-1], -1))
  return jax.tree.map(one, gradients, sketch.find_basis(state))


# What is sketched, and what comes out.


@pytest.mark.parametrize("rank", [6, 7, 100])
def test_a_rank_of_n_in_or_more_is_plain_sgd(rank):
  params = {"w": normal(6, 5), "stack": normal(2, 4, 3), "b": normal(5)}
  tx = sketched(optax.sgd(0.3), rank=rank)
  state = tx.init(params)
  assert not jax.tree.leaves(state.basis)
  for g in (like(params), like(params)):
    updates, state = tx.update(g, state, params)
    equal(updates, jax.tree.map(lambda x: np.float32(-0.3) * x, g))


@pytest.mark.parametrize("shape, axes, batch, n", [
    ((7, 5), (1, 1), (), 7),
    ((2, 7, 5), None, (2,), 7),  # stacked layers, or experts
    ((2, 3, 7, 5), None, (2, 3), 7),  # stacked experts
    ((7, 2, 3), (1, 2), (), 7),  # head-split in: [d, h, k]
    ((2, 4, 5), (2, 1), (), 8),  # head-split out: [h, k, d]
    ((3, 2, 4, 5), (2, 1), (3,), 8),
])
def test_the_dense_path_is_v_v_transposed_g_of_every_layer(
    shape, axes, batch, n):
  tx = sketched(
      optax.sgd(0.5), axes=None if axes is None else lambda path, leaf: axes)
  w, g = normal(*shape), normal(*shape)
  state = tx.init(w)
  assert state.basis.shape == (*batch, n, 3)
  updates, _ = tx.update(g, state, w)
  assert updates.shape == shape and updates.dtype == jnp.float32
  v, flat = f64(state.basis), f64(g.reshape(*batch, n, -1))
  expected = -0.5 * v @ (transposed(v) @ flat)
  close(updates.reshape(expected.shape), expected)


def test_where_decides_which_leaves_are_sketched():
  params = {"a": {"kernel": normal(7, 5)}, "norm": normal(7, 5)}
  where = lambda path, leaf: path == "a/kernel" and leaf.shape == (7, 5)
  tx = logra_jax.sketched(optax.sgd(0.1), rank=2, where=where)
  basis = jax.eval_shape(tx.init, params).basis
  assert basis["norm"] is None and basis["a"]["kernel"].shape == (7, 2)


@pytest.mark.parametrize("inner", [
    optax.adamw(0.1, weight_decay=0.3), logra_jax.scale_by_row_adam()],
    ids=["adamw", "row_adam"])
def test_sketches_and_dense_gradients_move_the_weights_alike(inner):
  tx = sketched(inner, refresh_every=2,
                axes=lambda path, leaf: (2, 1) if path == "o" else (1, 1))
  dense = low = {"s": normal(2, 7, 5), "o": normal(2, 4, 5), "b": normal(5)}
  dense_state = low_state = tx.init(dense)
  for _ in range(3):
    g = like(dense)
    sketches = sketches_of(low_state, g)
    updates, dense_state = tx.update(g, dense_state, dense)
    dense = add(dense, updates)
    updates, low_state = tx.update(sketches, low_state, low)
    kinds = {k: type(u) is logra_jax.LowRank for k, u in updates.items()}
    assert kinds == {"s": True, "o": True, "b": False}
    low = merge(low, updates)
  close(low, dense)
  close(low_state.inner, dense_state.inner)
  equal(low_state.basis, dense_state.basis)


def test_an_update_draws_the_basis_that_its_gradient_was_sketched_with():
  w = normal(2, 7, 5)
  tx = sketched(optax.sgd(0.1), refresh_every=2)
  state, draw = tx.init(w), quick(lambda update: update.basis)
  for _ in range(3):
    updates, new_state = tx.update(sketches_of(state, like(w)), state, w)
    equal(draw(updates), state.basis)
    state = new_state


def test_the_mean_of_the_lifted_update_over_seeds_is_the_dense_update():
  w, g = np.zeros((9, 2), np.float32), normal(9, 2)
  def two_updates(seed):
    tx = logra_jax.sketched(
        optax.sgd(1.0), rank=4, basis=bases.rademacher, seed=seed)
    first, state = tx.update(g, tx.init(w), w)
    return first, tx.update(g, state, w)[0]
  number = 4000
  for found in f64(quick(jax.vmap(two_updates))(jnp.arange(number))):
    error = found.std(0) / np.sqrt(number)
    assert (np.abs(found.mean(0) + g) < 6 * error).all()


@pytest.mark.parametrize("inner", [
    optax.adam(0.1), logra_jax.scale_by_row_adam(),
    logra_jax.scale_by_row_adam(restore_norm=True)])
def test_a_zero_sketch_gives_a_zero_update(inner):
  w, tx = normal(7, 5), sketched(inner, refresh_every=2)
  zero = logra_jax.Sketch(np.zeros((3, 5), np.float32))
  updates, _ = tx.update(zero, tx.init(w), w)
  equal(updates.factor, np.zeros((3, 5), np.float32))
  equal(merge(w, updates), w)


def test_extra_arguments_reach_the_inner_transform():
  spy = optax.GradientTransformationExtraArgs(
      lambda params: optax.EmptyState(),
      lambda u, state, params=None, *, factor, **extra: (
          jax.tree.map(lambda x: factor * x, u), state))
  tx, plain = sketched(spy), sketched(optax.sgd(-3.0))
  params = {"w": normal(7, 5), "b": normal(5)}
  g, state = like(params), tx.init(params)
  found, _ = tx.update(g, state, params, factor=3.0, unknown=1.0)
  close(found, plain.update(g, plain.init(params), params)[0], rtol=1e-6)


@pytest.mark.parametrize("low_rank", [False, True])
def test_without_params_a_transform_that_needs_none_works(low_rank):
  params = {"w": normal(7, 5), "b": normal(5)}
  tx, g = sketched(optax.sgd(0.5)), like(params)
  state = tx.init(params)
  g = sketches_of(state, g) if low_rank else g
  close(merge(params, tx.update(g, state)[0]),
        merge(params, tx.update(g, state, params)[0]), rtol=1e-6)


# Weight decay.


@pytest.mark.parametrize("low_rank", [False, True])
def test_decay_acts_once_on_the_dense_weight_and_not_in_the_sketch(low_rank):
  params = {"w": normal(7, 5), "stack": normal(2, 7, 5), "b": normal(5)}
  tx = sketched(optax.adamw(0.1, weight_decay=0.3), refresh_every=9)
  state = tx.init(params)
  g = jax.tree.map(np.zeros_like, params)
  g = sketches_of(state, g) if low_rank else g
  found = merge(params, tx.update(g, state, params)[0])
  close(found, jax.tree.map(lambda w: (1 - 0.1 * 0.3) * w, f64(params)), 1e-6)


def test_decay_is_added_to_the_update_without_it():
  params = {"w": normal(7, 5)}
  g, decays = like(params), (0.3, 0.0)
  txs = [sketched(optax.lion(0.1, weight_decay=decay)) for decay in decays]
  with_decay, without = (
      tx.update(g, tx.init(params), params)[0]["w"] for tx in txs)
  close(with_decay, f64(without) - 0.03 * f64(params["w"]))


@pytest.mark.parametrize("rank", [3, 7])
def test_a_bare_array_is_treated_as_a_tree_of_one_leaf(rank):
  w, g = normal(7, 5), normal(7, 5)
  # Both leaves are named "", and bases are drawn by name.
  tx = sketched(optax.adamw(0.1, weight_decay=0.3), rank=rank, refresh_every=9)
  bare, _ = tx.update(g, tx.init(w), w)
  tree, _ = tx.update({"": g}, tx.init({"": w}), {"": w})
  close(bare, tree[""], rtol=1e-6)


# When the basis is redrawn.


def test_a_basis_is_held_for_refresh_every_updates_then_new():
  w = normal(2, 7, 5)
  tx = sketched(optax.sgd(0.1), refresh_every=3)
  state, held = tx.init(w), []
  for i in range(7):
    held.append(np.asarray(state.basis))
    assert int(state.count) == i
    _, state = tx.update(like(w), state, w)
  same = [np.array_equal(a, b) for a, b in zip(held, held[1:], strict=False)]
  assert same == [True, True, False, True, True, False]
  assert not np.array_equal(held[0], held[6])


@pytest.mark.parametrize("law", [bases.hadamard, bases.rademacher])
def test_every_basis_can_be_drawn_again_from_numbers_and_names(law):
  params = {"layers": {"kernel": normal(2, 12, 2)}}
  tx = sketched(optax.sgd(0.1), basis=law, refresh_every=2, seed=17)
  redraw = quick(lambda refresh: law(
      keys.leaf_key(jax.random.key(17), refresh, "layers/kernel"), 12, 3,
      batch=(2,)))
  state = tx.init(params)
  for count in range(4):
    equal(state.basis["layers"]["kernel"], redraw(count // 2))
    _, state = tx.update(like(params), state, params)


def test_an_optimiser_rebuilt_in_the_middle_goes_on_the_same():
  w = normal(7, 5)
  one, other = (
      sketched(optax.adam(0.1), refresh_every=2, seed=5) for _ in range(2))
  state = one.init(w)
  for _ in range(3):
    _, state = one.update(like(w), state, w)
  # A resume restores arrays into the structure of a new initial state.
  restored = jax.tree.unflatten(
      jax.tree.structure(other.init(w)), jax.tree.leaves(state))
  g = like(w)
  equal(other.update(g, restored, w), one.update(g, state, w))


def test_leaves_and_seeds_have_bases_of_their_own():
  params = {"a": normal(7, 5), "b": normal(7, 5)}
  states = [sketched(optax.sgd(0.1), seed=s).init(params) for s in (0, 1)]
  drawn = [np.ravel(v) for s in states for v in s.basis.values()]
  assert len(np.unique(drawn, axis=0)) == 4


# Other leaves of the tree.


@pytest.mark.parametrize("carry", ["keep", "reset"])
def test_dense_leaves_are_treated_exactly_as_by_the_inner_transform(carry):
  inner = optax.adamw(optax.linear_schedule(0.1, 0.5, 5), weight_decay=0.2)
  params = {"w": normal(7, 5), "b": normal(5)}
  tx = sketched(inner, refresh_every=2, carry=carry)
  plain = quick(inner.update)
  state, plain_state = tx.init(params), inner.init(params["b"])
  for _ in range(5):
    g = like(params)
    updates, state = tx.update(g, state, params)
    expected, plain_state = plain(g["b"], plain_state, params["b"])
    close(updates["b"], expected, rtol=1e-6)


@pytest.mark.parametrize("hole", [None, optax.MaskedNode()])
@pytest.mark.parametrize("low_rank", [False, True])
def test_absent_leaves_pass_through(hole, low_rank):
  params = {"w": normal(7, 5), "gone": hole, "deep": {"x": hole}}
  tx = sketched(optax.adam(0.1), refresh_every=2)
  state = tx.init(params)
  g = sketches_of(state, like(params)) if low_rank else like(params)
  updates, _ = tx.update(g, state, params)
  for tree in (updates, merged := merge(params, updates)):
    assert tree["gone"] == hole and tree["deep"]["x"] == hole
  assert not np.array_equal(merged["w"], params["w"])


# What is refused.


@pytest.mark.parametrize("kwargs, message", [
    ({"rank": 0}, "rank 0 .*256"),
    ({"refresh_every": 0}, "refresh_every 0 .*every"),
    ({"carry": "drop"}, "'drop' is unknown.*keep.*reset.*rotate"),
])
def test_an_impossible_argument_is_an_error_that_names_it(kwargs, message):
  with pytest.raises(ValueError, match=message):
    logra_jax.sketched(optax.sgd(0.1), **kwargs)


@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (2, 1), (-1, 1)])
def test_axes_that_do_not_fit_a_leaf_are_an_error_that_names_it(axes):
  tx = logra_jax.sketched(
      optax.sgd(0.1), rank=3, axes=lambda path, leaf: axes)
  with pytest.raises(ValueError, match=r"'a/w'.*\(7, 5\)"):
    jax.eval_shape(tx.init, {"a": {"w": normal(7, 5)}})


@pytest.mark.parametrize("rank, shape", [
    (3, (4, 5)), (3, (3, 4)), (3, (2, 3, 5)), (7, (7, 5))])
def test_a_sketch_that_does_not_fit_its_leaf_is_an_error(rank, shape):
  params, tx = {"kernel": normal(7, 5)}, sketched(optax.sgd(0.1), rank=rank)
  sketches = {"kernel": logra_jax.Sketch(normal(*shape))}
  with pytest.raises(ValueError, match="kernel"):
    tx.update(sketches, tx.init(params), params)


def test_find_basis_wants_exactly_one_sketched():
  w = normal(7, 5)
  one = logra_jax.sketched(optax.sgd(0.1), rank=3)
  found = sketch.find_basis(
      jax.eval_shape(optax.chain(optax.clip(1.0), one).init, w))
  assert found.shape == (7, 3)
  for tx, number in ((optax.sgd(0.1), 0), (optax.chain(one, one), 2)):
    with pytest.raises(ValueError, match=f"found {number} .*exactly one"):
      sketch.find_basis(jax.eval_shape(tx.init, w))


def test_a_kernel_too_narrow_to_sketch_is_still_a_matrix_to_inner():
  gradient = normal(8, 2, 4)
  tx = logra_jax.sketched(
      logra_jax.scale_by_row_adam(), rank=8, axes=lambda path, leaf: (1, 2))
  got, _ = tx.update(gradient, tx.init(gradient))
  plain = logra_jax.scale_by_row_adam()
  flat = gradient.reshape(8, 8)
  wanted, _ = plain.update(flat, plain.init(flat))
  assert jnp.array_equal(got, wanted.reshape(8, 2, 4))


def test_a_transform_that_reads_the_weights_norm_gives_no_nan():
  weight, gradient = normal(32, 4), normal(32, 4)
  tx = logra_jax.sketched(
      optax.adaptive_grad_clip(0.1), rank=8, carry="keep")
  update, _ = tx.update(gradient, tx.init(weight), weight)
  assert jnp.isfinite(update).all()
