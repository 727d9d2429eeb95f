"""Taps: sketches without kernel gradients, and tangents of the same taps."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logra_jax
from logra_jax import bases
from logra_jax import keys
from logra_jax import low_rank
from logra_jax import optimizers
from logra_jax import sharding
from logra_jax import taps
from logra_jax.models import config as config_lib
from logra_jax.models import transformer

RNG = np.random.default_rng()


def normal(*shape, scale=1.0):
  return jnp.asarray(scale * RNG.standard_normal(shape), jnp.float32)


def close(found, expected, tolerance=1e-5):
  """Largest difference, relative to the largest entry."""
  found, expected = np.asarray(found), np.asarray(expected)
  assert found.shape == expected.shape
  error = np.abs(found - expected).max()
  assert error <= tolerance * np.abs(expected).max(), error


# A plain-JAX MLP of three layers with odd sizes, in every form.
LAYERS, WIDTH, TAP = 3, 19, 4


def mlp(kernel, basis, tap, x, remat=False, scan=True):
  def body(x, layer):
    return jnp.tanh(logra_jax.tapped_linear(x, *layer)), None
  body = jax.checkpoint(body) if remat else body
  if scan:
    return jax.lax.scan(body, x, (kernel, basis, tap))[0]
  for i in range(LAYERS):
    x, _ = body(x, (kernel[i], basis[i], tap[i]))
  return x


def mlp_inputs():
  kernel = normal(LAYERS, WIDTH, WIDTH, scale=0.3)
  basis = bases.gaussian(
      jax.random.key(RNG.integers(2**31)), WIDTH, TAP, batch=(LAYERS,))
  return kernel, basis, jnp.zeros((LAYERS, TAP, WIDTH)), normal(16, WIDTH)


def dense_mlp(kernel, x):
  body = lambda x, w: (jnp.tanh(x @ w), None)
  return jax.lax.scan(body, x, kernel)[0]


loss_of = lambda y: jnp.sum(jnp.sin(y) * jnp.arange(y.shape[-1]))


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("devices", [1, 8])
def test_a_tap_gradient_is_the_sketch_of_the_kernel_gradient(
    remat, scan, devices):
  kernel, basis, tap, x = mlp_inputs()
  dense = jax.grad(lambda w: loss_of(dense_mlp(w, x)))(kernel)
  expected = jnp.swapaxes(basis, -1, -2) @ dense
  if devices == 8:
    mesh = sharding.make_mesh({"data": 8})
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
  form = functools.partial(mlp, remat=remat, scan=scan)
  found = jax.jit(jax.grad(
      lambda tap: loss_of(form(kernel, basis, tap, x))))(tap)
  close(found, expected)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name, argnum", [("kernel", 0), ("basis", 1)])
def test_kernel_and_basis_have_no_gradient_not_even_zero(
    name, argnum, remat, scan):
  kernel, basis, tap, x = mlp_inputs()
  fn = lambda *a: loss_of(mlp(*a, x, remat=remat, scan=scan))
  with pytest.raises(TypeError, match=f"{name} of a tapped linear.*tap"):
    jax.eval_shape(jax.grad(fn, argnum), kernel, basis, tap)
  with pytest.raises(TypeError, match=f"{name} of a tapped linear"):
    jax.eval_shape(jax.grad(fn, (argnum, 2)), kernel, basis, tap)
  args = (kernel, basis, tap)
  forward = lambda a: fn(*args[:argnum], a, *args[argnum + 1:])
  with pytest.raises(TypeError, match=f"{name} of a tapped linear"):
    jax.eval_shape(
        lambda a: jax.jvp(forward, (a,), (a,)), args[argnum])


def test_the_input_gradient_is_that_of_the_untapped_linear():
  kernel, basis, tap, x = mlp_inputs()
  found = jax.grad(lambda x: loss_of(mlp(kernel, basis, tap, x)))(x)
  close(found, jax.grad(lambda x: loss_of(dense_mlp(kernel, x)))(x))


def test_the_value_ignores_the_tap():
  kernel, basis, tap, x = mlp_inputs()
  assert (mlp(kernel, basis, tap + 7.0, x) == mlp(kernel, basis, tap, x)).all()


# The real decoder.
def decoder(tied, remat=True, **sizes):
  """Structure and random weights; the initialiser is not of interest."""
  sizes = dict(vocab_size=14, num_layers=2, embed_dim=24, num_heads=4,
               num_kv_heads=2, head_dim=6, mlp_dim=40) | sizes
  config = config_lib.DecoderConfig(tied_head=tied, remat=remat, **sizes)
  graph, shapes = transformer.abstract(config)
  def one(path, p):
    if keys.leaf_path(path).endswith("scale"):
      return 1.0 + normal(*p.shape, scale=0.1)
    return normal(*p.shape, scale=p.shape[-2] ** -0.5)
  return graph, jax.tree.map_with_path(one, shapes)


def batch(rows=8, slots=9, vocab=14):
  tokens = jnp.asarray(RNG.integers(0, vocab, (rows, slots)), jnp.int32)
  padding = RNG.integers(0, 4, (rows, 1))
  return tokens, jnp.asarray(np.arange(slots) >= padding)


def logits_of(graph, params, tokens, mask):
  return transformer.completion_logits(graph, params, tokens, mask, 5)


def random_bases(params, rank=4):
  """Any V of every projection."""
  return jax.tree.map(
      lambda p, group: normal(*p.shape[:-1], rank)
      if group == "sketched" else None, params, optimizers.groups(params))


def decoder_gradients(graph, params, basis, weights, *args):
  loss = lambda params: (
      jnp.sum(weights * jax.nn.log_softmax(logits_of(graph, params, *args))),
      None)
  trainable = jax.tree.map(lambda _: True, params)
  return taps.value_and_grad(loss, params, basis, trainable)()[1]


@pytest.mark.parametrize("tied, remat, devices", [
    (True, True, 8), (False, False, 1)])
def test_sketches_of_the_decoder_are_those_of_its_gradients(
    tied, remat, devices):
  graph, params = decoder(tied, remat)
  basis, args = random_bases(params), batch()
  weights = normal(8, 5, 14)
  dense = jax.jit(jax.grad(lambda params: jnp.sum(weights * jax.nn.log_softmax(
      logits_of(graph, params, *args)))))(params)
  program = jax.jit(functools.partial(decoder_gradients, graph))
  if devices == 8:
    mesh = sharding.make_mesh({"data": 4, "model": 2})
    rows = jax.NamedSharding(mesh, jax.P(sharding.BATCH))
    specs = sharding.named(sharding.param_specs(params, mesh), mesh)
    with jax.set_mesh(mesh):
      found = program(
          jax.device_put(params, specs), basis, jax.device_put(weights, rows),
          *jax.device_put(args, rows))
  else:
    found = program(params, basis, weights, *args)
  sketches = 0
  def check(path, g, v, s):
    nonlocal sketches
    assert isinstance(s, low_rank.Sketch) == (v is not None), path
    if v is None:
      close(s, g)  # tied, the embedding's is the sum of both uses
    else:
      sketches += 1
      close(s.value, jnp.swapaxes(v, -1, -2) @ g)
  jax.tree.map_with_path(check, dense, basis, found)
  assert sketches == 7


def test_untrained_leaves_get_no_gradient():
  graph, params = decoder(True)
  loss = lambda p, *args: (jnp.sum(logits_of(graph, p, *args) ** 2), None)
  trainable = jax.tree.map(lambda g: g == "dense", optimizers.groups(params))
  grad = taps.value_and_grad(loss, params, random_bases(params), trainable)
  _, gradients = jax.eval_shape(grad, *batch())
  assert gradients["embed"]["embedding"] is None
  assert gradients["final_norm"]["scale"].shape == (24,)
  q = gradients["layers"]["attn"]["q_proj"]["kernel"]
  assert q.value.shape == (2, 4, 24) and q.value.dtype == jnp.float32


def random_updates(params, groups, rank=4):
  """A decaying update of every kernel, and one of every dense leaf."""
  def one(path, p, group):
    if group == "dense":
      return normal(*p.shape, scale=0.3)
    return low_rank.LowRank(
        normal(*p.shape[:-2], rank, p.shape[-1], scale=0.1), jnp.float32(0.2),
        keys.leaf_key(jax.random.key(0), 0, keys.leaf_path(path)),
        bases.rademacher, p.shape[-2])
  return jax.tree.map_with_path(one, params, groups)


def only(updates, low_rank_leaves):
  """The updates with those of the other kind set to zero."""
  return jax.tree.map(
      lambda u: u if isinstance(u, low_rank.LowRank) == low_rank_leaves
      else low_rank.scale(u, 0.0), updates, is_leaf=low_rank.is_node)


def without_decay(updates):
  return jax.tree.map(
      lambda u: u.replace(decay=0.0 * u.decay)
      if isinstance(u, low_rank.LowRank) else u,
      updates, is_leaf=low_rank.is_node)


def test_the_tangent_is_the_derivative_along_the_whole_update():
  graph, params = decoder(tied=True)
  args = batch()
  # The embedding moves too, in both of its uses.
  updates = random_updates(params, optimizers.groups(
      params, frozen=lambda path, leaf: False))
  basis = jax.tree.map(
      lambda _, u: u.basis if isinstance(u, low_rank.LowRank) else None,
      params, updates)
  fn = lambda params: logits_of(graph, params, *args)
  along = jax.jit(lambda updates: taps.jvp(fn, params, basis, updates))
  at = jax.jit(lambda s: fn(logra_jax.apply_updates(
      params, low_rank.scale(updates, s))))
  value, tangent = along(updates)
  close(value, at(0.0))
  # Central differences of fourth order: rounding is what remains.
  h = 0.02
  f = {k: np.asarray(at(k * h), np.float64) for k in (-2, -1, 1, 2)}
  differences = (8 * (f[1] - f[-1]) - (f[2] - f[-2])) / (12 * h)
  close(tangent, differences, 1e-3)
  # Every kind of leaf has a share, and the shares add up.
  _, of_kernels = along(only(updates, True))
  _, of_dense = along(only(updates, False))
  close(of_kernels + of_dense, tangent)
  _, undecayed = along(without_decay(updates))
  for part in (of_dense, undecayed - tangent):
    assert jnp.abs(part).max() > 1e-2 * jnp.abs(tangent).max()


# Buffers of the compiled gradient programs.
MOVES = {
    "parameter", "get-tuple-element", "tuple", "while", "call", "fusion",
    "bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice"}
INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+ = (f32|bf16|f16)\[([\d,]*)\]\S* ([\w-]+)\(",
    re.MULTILINE)


def computed_kernels(compiled, params):
  """Float results of a kernel's shape, one layer or all, either way round.

  A fusion is judged by the instructions inside it; what only moves a weight
  makes no gradient.
  """
  shapes = set()
  for leaf, group in zip(
      jax.tree.leaves(params), jax.tree.leaves(optimizers.groups(params)),
      strict=True):
    if group == "sketched":
      layers, n, m = leaf.shape
      for lead in ((), (1,), (layers,)):
        shapes |= {(*lead, n, m), (*lead, m, n)}
  found = INSTRUCTION.findall(compiled.as_text())
  assert {"dot", "fusion"} & {op for _, _, op in found}  # text was understood
  return [
      (op, dims) for _, dims, op in found if op not in MOVES
      and tuple(int(d) for d in dims.split(",") if d) in shapes]


@pytest.mark.parametrize("remat", [True, False])
def test_no_buffer_of_a_kernel_gradient_is_in_the_gradient_program(remat):
  sizes = dict(vocab_size=29, num_layers=3, embed_dim=86, num_heads=6,
               num_kv_heads=2, head_dim=14, mlp_dim=122)
  graph, params = decoder(True, remat, **sizes)
  args = batch(2, 7)
  frozen = jax.tree.map(lambda _: False, params)
  loss = lambda p: (jnp.sum(logits_of(graph, p, *args) ** 2), None)
  tapped = jax.jit(lambda p, v: taps.value_and_grad(
      loss, p, v, frozen)()).lower(params, random_bases(params)).compile()
  assert computed_kernels(tapped, params) == []

  if not remat:
    return  # what follows is about the check
  # The same check sees the gradients of the untapped program.
  dense = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(
      params).compile()
  assert computed_kernels(dense, params)
  temporary, outputs = (
      [getattr(program.memory_analysis(), f"{kind}_size_in_bytes")
       for program in (tapped, dense)] for kind in ("temp", "output"))
  assert temporary[0] < temporary[1]
  assert outputs[0] < 0.1 * outputs[1]
