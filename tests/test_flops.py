"""Laws of the FLOP count: loops against unrolled compiles, closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from logra_jax import flops

P = jax.sharding.PartitionSpec


def array(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def xla(fn, *args):
  """What XLA counts in the compiled program: right only without loops."""
  # On CPU some versions drop the barriers of jax.checkpoint, and then merge
  # the recomputed forward pass of unrolled code with the first one.
  options = {"xla_disable_hlo_passes": "cse"}
  compiled = jax.jit(fn).lower(*args).compile(compiler_options=options)
  return compiled.cost_analysis()["flops"]


def mlp(layer, scan, w, x):
  """Loss of a stack of layers, looped or written out."""
  if scan:
    h, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), x, w)
  else:
    h = functools.reduce(layer, [w[i] for i in range(w.shape[0])], x)
  return jnp.sum(h * h)


def layer(h, w):
  return h + jnp.tanh(h @ w)


def test_a_matmul_chain_agrees_with_xla():
  def chain(a, b, c):
    return (a @ b) @ c

  shapes = array(17, 64), array(64, 33), array(33, 5)
  exact = 2 * 17 * 64 * 33 + 2 * 17 * 33 * 5
  assert flops.count(chain, *shapes) == exact
  assert exact == pytest.approx(xla(chain, *shapes), rel=0.02)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
@pytest.mark.parametrize(
    "transform", [lambda f: f, functools.partial(jax.grad, argnums=(0, 1))])
def test_a_scanned_mlp_counts_as_its_unrolled_compile(wrap, transform):
  w, x = array(5, 96, 96), array(64, 96)
  looped, unrolled = (
      transform(functools.partial(mlp, wrap(layer), scan))
      for scan in (True, False)
  )
  ours = flops.count(looped, w, x)
  assert ours == pytest.approx(xla(unrolled, w, x), rel=0.02)
  assert ours == pytest.approx(flops.count(unrolled, w, x), rel=0.02)
  assert ours > 2 * xla(looped, w, x)  # why this module exists


def test_checkpoint_adds_exactly_one_forward_of_the_layers():
  w, x = array(5, 96, 96), array(64, 96)
  plain, remat = (
      flops.count(jax.grad(functools.partial(mlp, f, True)), w, x)
      for f in (layer, jax.checkpoint(layer))
  )
  assert remat - plain == pytest.approx(5 * 2 * 64 * 96 * 96, rel=0.02)


def test_unused_work_is_not_counted():
  def dead(x):
    _ = x @ x
    return 2 * x

  assert flops.count(dead, array(8, 8)) == 64
  # The gradient of a linear loss needs no forward product.
  linear = jax.grad(lambda w, x: jnp.sum(x @ w))
  assert flops.count(linear, array(32, 16), array(8, 32)) < 1.1 * (
      2 * 8 * 32 * 16)


def squared(h, _):
  return h @ h, None


def test_nested_scans_multiply():
  def step(h, _):
    return jax.lax.scan(squared, h, length=3)[0], None

  ours = flops.count(lambda x: jax.lax.scan(step, x, length=7), array(4, 4))
  assert ours == 7 * 3 * 2 * 4**3


@pytest.mark.parametrize("equation, sizes", [
    ("bmk,bkn->bmn", dict(b=3, m=32, k=48, n=40)),
    ("kbm,nbk->bmn", dict(b=3, m=32, k=48, n=40)),
    ("bhtd,bhsd->bhts", dict(b=2, h=3, t=16, s=24, d=32)),
    ("mn,mn->", dict(m=32, n=48)),
])
def test_batched_dots_agree_with_xla(equation, sizes):
  operands = [
      array(*(sizes[c] for c in term))
      for term in equation.split("->")[0].split(",")
  ]
  dot = functools.partial(jnp.einsum, equation)
  expected = 2 * np.prod(list(sizes.values()))
  assert flops.count(dot, *operands) == expected
  assert expected == pytest.approx(xla(dot, *operands), rel=0.02)


def test_a_ragged_dot_costs_one_group_a_row():
  args = array(12, 5), array(3, 5, 7), array(3, dtype=jnp.int32)
  assert flops.count(jax.lax.ragged_dot, *args) == 2 * 12 * 5 * 7


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_agrees_with_xla(groups):
  conv = functools.partial(
      jax.lax.conv_general_dilated, window_strides=(2, 1), padding="VALID",
      dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups)
  x, kernel = array(2, 9, 8, 4), array(3, 3, 4 // groups, 6)
  ours = flops.count(conv, x, kernel)
  assert ours == 2 * (2 * 4 * 6 * 6) * (3 * 3 * 4 // groups)
  assert ours == pytest.approx(xla(conv, x, kernel), rel=0.02)


def test_a_cond_costs_its_dearest_branch():
  def choose(i, x):
    return jax.lax.switch(i, [lambda x: x, lambda x: x @ x, jnp.sin], x)

  assert flops.count(choose, 0, array(6, 6)) == 2 * 6**3


def test_a_fori_loop_counts_as_its_unrolled_compile():
  def body(_, h):
    return jnp.tanh(h @ h)

  def unrolled(x):
    return functools.reduce(lambda h, i: body(i, h), range(2, 8), x)

  x = array(64, 64)
  ours = flops.count(lambda x: jax.lax.fori_loop(2, 8, body, x), x)
  assert ours == pytest.approx(xla(unrolled, x), rel=0.02)


def as_while(lower, upper, step, x):
  # Array bounds make fori_loop, and any hand-written loop, a `while`.
  return jax.lax.while_loop(
      lambda c: c[0] < upper, lambda c: (c[0] + step, c[1] * 2),
      (jnp.int32(lower), x))[1]


@pytest.mark.parametrize("lower, upper, step", [
    (0, 5, 1), (2, 7, 1), (0, 7, 3), (-4, 4, 2), (5, 5, 1), (9, 5, 1)])
def test_a_while_with_literal_bounds_trips_as_its_range(lower, upper, step):
  loop = functools.partial(as_while, lower, upper, step)
  assert flops.count(loop, array(3)) == 3 * len(range(lower, upper, step))


@pytest.mark.parametrize("shrink", [0, 1])
def test_a_carried_bound_is_read_only_if_the_body_keeps_it(shrink):
  def loop(x):
    return jax.lax.while_loop(
        lambda c: c[0] < c[1],
        lambda c: (c[0] + 1, c[1] - shrink if shrink else c[1], 2 * c[2]),
        (jnp.int32(0), jnp.int32(5), x))

  if shrink:
    with pytest.raises(ValueError, match="while_trips"):
      flops.count(loop, array(3))
  else:
    assert flops.count(loop, array(3)) == 15


def collatz(n, x):
  return jax.lax.while_loop(
      lambda c: (c[0] > 1) & (jnp.sum(c[1]) < 1e9),
      lambda c: (
          jnp.where(c[0] % 2, 3 * c[0] + 1, c[0] // 2), c[1] @ c[1]),
      (n, x))[1]


def test_an_invisible_trip_count_is_refused_with_the_remedy():
  with pytest.raises(ValueError, match="`while`.*while_trips=") as error:
    flops.count(collatz, 7, array(4, 4))
  assert "\n" not in str(error.value)


def test_while_trips_pays_one_test_more_than_bodies():
  body, test = 2 * 4**3, 4 * 4 + 1  # a product; a sum and a comparison
  for trips in (0, 9):
    ours = flops.count(collatz, 7, array(4, 4), while_trips=trips)
    assert ours == trips * body + (trips + 1) * test
  with pytest.raises(ValueError, match="while_trips=-1"):
    flops.count(collatz, 7, array(4, 4), while_trips=-1)


def test_while_trips_leaves_visible_counts_alone():
  loop = functools.partial(as_while, 0, 5, 1)
  assert flops.count(loop, array(3), while_trips=1000) == 15


def custom_jvp(x):
  f = jax.custom_jvp(lambda x: x @ x)
  f.defjvp(lambda p, t: (p[0], t[0]))
  return f(x)


def custom_vjp(x):
  f = jax.custom_vjp(lambda x: x @ x)
  f.defvjp(lambda x: (x @ x, None), lambda _, g: (g,))
  return f(x)


@pytest.mark.parametrize("call", [
    jax.jit(lambda x: jax.jit(jnp.matmul)(x, x)),
    jax.checkpoint(lambda x: x @ x),
    jax.vmap(lambda row: row @ jnp.ones((4, 4)), in_axes=1),
    custom_jvp,
    custom_vjp,
])
def test_calls_are_looked_into(call):
  assert flops.count(call, array(4, 4)) == 2 * 4**3


def test_shard_map_counts_every_device_along_its_own_axes():
  mesh = jax.make_mesh(
      (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  args = array(8, 6), array(6, 10)
  share = functools.partial(jax.shard_map, jnp.matmul, mesh=mesh)
  split = share(in_specs=(P("data"), P(None, "model")),
                out_specs=P("data", "model"))
  assert flops.count(split, *args) == 2 * 8 * 6 * 10
  partial = share(in_specs=(P("data"), P()), out_specs=P("data"),
                  axis_names={"data"})
  assert flops.count(partial, *args) == 2 * 8 * 6 * 10
  # Every device does all of it.
  replicated = share(in_specs=(P(), P()), out_specs=P())
  assert flops.count(replicated, *args) == 8 * 2 * 8 * 6 * 10


def test_a_pallas_kernel_runs_once_a_grid_point():
  def kernel(x, y):
    y[...] = 2 * x[...]

  block = pl.BlockSpec((2,), lambda i: i)
  double = pl.pallas_call(
      kernel, grid=(4,), in_specs=[block], out_specs=block,
      out_shape=array(8), interpret=True)
  assert flops.count(double, array(8)) == 8


@pytest.mark.parametrize("fn, expected", [
    (lambda x: x + 1, 24),
    (jnp.exp, 24),
    (lambda x: x > 0, 24),
    (lambda x: jax.lax.mul(x, jnp.ones((1, 6))), 24),
    (lambda x: jnp.clip(x, 0.0, 1.0), 48),
    (jnp.sum, 24),
    (lambda x: jnp.max(x, 1), 24),
    (lambda x: jnp.argmax(x, 1), 24),
    (lambda x: jnp.cumsum(x, 1), 24),
    (lambda x: jnp.sort(x, 1), 24 * 3),
    (lambda x: jax.lax.top_k(x, 2), 24),
    (lambda x: x.at[1].add(2.0), 6),
    (lambda x: x.at[1].set(2.0), 0),
    (lambda x: x.T.reshape(3, 8)[:, ::2].astype(jnp.bfloat16), 0),
    (lambda x: jnp.where(jnp.arange(6) < 3, x, 0.0), 0),
    (lambda x: jnp.arange(24) * 3 + 1, 0),
    (lambda x: jax.random.bits(jax.random.key(0), (24,)), 0),
    (lambda x: jnp.ones((4, 4), jnp.int8) @ jnp.ones((4, 4), jnp.int8), 0),
])
def test_small_operations_cost_their_closed_form(fn, expected):
  assert flops.count(fn, array(4, 6)) == expected


def cholesky_operations(n):
  return sum(1 + (n - k - 1) + (n - k - 1) * (n - k) for k in range(n))


def lu_operations(m, n):
  return sum((m - k - 1) * (1 + 2 * (n - k - 1)) for k in range(n))


def qr_operations(m, n):
  """Householder: reflect what is left of R, then build Q backwards."""
  return sum(4 * (m - k) * (n - k) * 2 for k in range(n))


@pytest.mark.parametrize("fn, args, expected", [
    (functools.partial(jax.lax.linalg.cholesky, symmetrize_input=False),
     [array(2, 90, 90)], 2 * cholesky_operations(90)),
    (jax.lax.linalg.lu, [array(2, 120, 90)], 2 * lu_operations(120, 90)),
    (jnp.linalg.qr, [array(2, 120, 90)], 2 * qr_operations(120, 90)),
    (lambda a: jnp.linalg.qr(a.mT), [array(90, 120)], qr_operations(120, 90)),
])
def test_factorisations_cost_the_operations_of_the_textbook(fn, args, expected):
  assert flops.count(fn, *args) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("left_side", [True, False])
def test_a_triangular_solve_costs_n_squared_a_right_hand_side(left_side):
  solve = functools.partial(
      jax.lax.linalg.triangular_solve, left_side=left_side)
  b = array(5, 7, 3) if left_side else array(5, 3, 7)
  assert flops.count(solve, array(5, 7, 7), b) == 5 * 3 * 7**2


def test_spectral_decompositions_cost_their_textbook_constants():
  eigh = functools.partial(jax.lax.linalg.eigh, symmetrize_input=False)
  assert flops.count(eigh, array(2, 8, 8)) == 2 * 9 * 8**3
  svd = functools.partial(jax.lax.linalg.svd, full_matrices=False)
  for shape in (8, 5), (5, 8):
    assert flops.count(svd, array(*shape)) == 14 * 8 * 25 + 8 * 125


def test_a_linear_solve_is_one_factorisation_and_two_sweeps():
  ours = flops.count(jnp.linalg.solve, array(60, 60), array(60, 1))
  assert ours == pytest.approx(2 * 60**3 / 3 + 2 * 60**2, rel=0.01)


def test_a_primitive_without_a_rule_is_refused_by_name():
  with pytest.raises(ValueError, match="'fft'.*by hand") as error:
    flops.count(jnp.fft.fft, array(8, dtype=jnp.complex64))
  assert "\n" not in str(error.value)


def test_arrays_shapes_and_keywords_count_alike():
  x = jax.random.normal(jax.random.key(0), (3, 4))

  def fn(x, *, w):
    return x @ w

  by_shape = flops.count(fn, array(3, 4), w=array(4, 5))
  assert by_shape == flops.count(fn, x, w=jnp.ones((4, 5))) == 2 * 3 * 4 * 5
  assert type(by_shape) is int


def test_large_counts_do_not_overflow():
  n = 2**20
  ours = flops.count(
      lambda x: jax.lax.scan(squared, x, length=10**6)[0], array(n, n))
  assert ours == 10**6 * 2 * n**3
