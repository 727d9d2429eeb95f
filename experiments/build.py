"""From a configuration to the objects of a run, with every check it needs.

All of it happens before a program is compiled; a wrong value is a `ValueError`
of one line that names the value and what to do.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import config_dict

from logra_jax import bases
from logra_jax import optimizers
from logra_jax import sharding
from logra_jax.data import tasks
from logra_jax.data import tokenizer as tokenizer_lib
from logra_jax.models import config as model_config
from logra_jax.models import transformer
from logra_jax.rl import advantages

BASES = {law.__name__: law for law in (
    bases.stiefel, bases.rademacher, bases.gaussian, bases.coordinate,
    bases.hadamard)}
# (rewards [P, G], running baseline) -> (advantages [P, G], next baseline)
ADVANTAGES: dict[str, Callable[..., tuple[jax.Array, Any]]] = {
    "grpo": lambda rewards, baseline: (advantages.grpo(rewards), baseline),
    "rloo": lambda rewards, baseline: (advantages.rloo(rewards), baseline),
    "reinforce": advantages.reinforce,
}
# With padding and EOS 48 symbols, which the mesh axes in use divide.
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=<>()"


class Data(NamedTuple):
  """Examples to learn from and examples to be measured on, disjoint."""
  train: list[tasks.Example]
  held_out: list[tasks.Example]


class Model(NamedTuple):
  """A decoder's structure, its weights' shapes and where they live."""
  config: model_config.DecoderConfig
  graph: nnx.GraphDef
  shapes: Any  # ShapeDtypeStructs
  shardings: Any  # NamedShardings


def check_numbers(config: config_dict.ConfigDict) -> None:
  """Counts that must be at least 1, and numbers that must be positive."""
  for name in ("updates", "eval_every", "checkpoint_every", "keep_last",
               "rollout.max_new_tokens", "warm_start.updates",
                "data.prompt_width", "data.examples"):
    if config_value(config, name) < 1:
      raise ValueError(f"{name} {config_value(config, name)} is below 1")
  for name in ("rollout.temperature", "warm_start.learning_rate"):
    if not config_value(config, name) > 0:
      raise ValueError(
          f"{name} {config_value(config, name)} is not positive")
  if not config.tasks:
    raise ValueError(f"tasks is empty: choose from {sorted(tasks.TASKS)}")


def config_value(config: config_dict.ConfigDict, name: str) -> Any:
  """The value of a field named with dots."""
  return functools.reduce(getattr, name.split("."), config)


def mesh(config: config_dict.ConfigDict) -> Mesh:
  """The mesh of config.mesh over all devices; rows must divide over it."""
  made = sharding.make_mesh(config.mesh.to_dict())
  shards = made.shape["data"] * made.shape["fsdp"]
  rows = config.rollout.prompts * config.rollout.group_size
  if config.microbatches < 1 or rows % config.microbatches:
    raise ValueError(
        f"microbatches {config.microbatches} does not divide the"
        f" {rows} rows of a rollout (prompts * group_size)")
  if config.probe_rows > rows:
    raise ValueError(
        f"probe_rows {config.probe_rows} is more than the {rows} rows of a"
        " rollout (prompts * group_size): lower it")
  for name, size in (
      ("rollout.prompts", config.rollout.prompts),
      ("rollout.prompts * group_size / microbatches",
       rows // config.microbatches),
      ("warm_start.batch_size", config.warm_start.batch_size),
      ("probe_rows", config.probe_rows),
      ("data.held_out * tasks", config.data.held_out * len(config.tasks))):
    if size < 1 or size % shards:
      raise ValueError(
          f"{name} {size} is not a positive multiple of the {shards} data"
          " shards (mesh.data * mesh.fsdp): change it or the mesh")
  return made


def tokenizer() -> tokenizer_lib.CharTokenizer:
  """The characters of every task."""
  return tokenizer_lib.CharTokenizer(ALPHABET)


def data(config: config_dict.ConfigDict) -> Data:
  """Training and held-out examples, one task after the other."""
  parts = []
  for index, task in enumerate(config.tasks):
    examples = tasks.generate(
        task.name, task.params.to_dict(), config.data.examples,
        seed=config.seed + index)
    parts.append(tasks.split(examples, config.data.held_out, config.seed))
  return Data(
      [example for train, _ in parts for example in train],
      [example for _, held_out in parts for example in held_out])


def model(config: config_dict.ConfigDict, mesh: Mesh, vocab_size: int) -> Model:
  """The decoder of config.model, its weights sharded by the table of rules."""
  sizes = model_config.DecoderConfig(
      vocab_size=vocab_size, **config.model.to_dict())
  graph, shapes = transformer.abstract(sizes)
  specs = sharding.param_specs(shapes, mesh)
  return Model(sizes, graph, shapes, sharding.named(specs, mesh))


class Optimizer(NamedTuple):
  """The transform, and which leaves it trains."""
  tx: optax.GradientTransformationExtraArgs
  groups: Any  # "sketched", "dense" or "frozen" by leaf

  def trained(self, params: Any) -> Any:
    """The params with `None` for those that are frozen."""
    return jax.tree.map(
        lambda p, g: None if g == "frozen" else p, params, self.groups)


def logra(config: config_dict.ConfigDict, shapes: Any) -> Optimizer:
  """LoGRA in the ratio form, or with a learning rate in the other."""
  c = config.optimizer
  if c.basis not in BASES:
    raise ValueError(
        f"optimizer.basis {c.basis!r} is unknown: choose from {sorted(BASES)}")
  if not c.step_multiplier > 0:
    raise ValueError(
        f"optimizer.step_multiplier {c.step_multiplier} is not positive")
  if not c.kl_budget > 0:
    raise ValueError(
        f"optimizer.kl_budget {c.kl_budget} is not positive: choose e.g. 2e-4,"
        " or optimizer.kl_control=False for no control")
  ratio_form = c.learning_rate is None
  tx = optimizers.logra(
      None if ratio_form else c.learning_rate * c.step_multiplier,
      rank=c.rank, basis=BASES[c.basis], refresh_every=c.refresh_every,
      kl_budget=c.kl_budget if c.kl_control else None, max_scale=c.max_scale,
      weight_ratio=c.weight_ratio * c.step_multiplier,
      weight_decay=c.weight_decay, max_norm=c.max_norm, b2=c.b2, seed=c.seed)
  frozen = optimizers.default_frozen(c.learning_rate)
  return Optimizer(tx, optimizers.groups(shapes, frozen=frozen))


OPTIMIZERS = {"logra": logra}


def optimizer(config: config_dict.ConfigDict, shapes: Any) -> Optimizer:
  """The optimiser named by config.optimizer.name."""
  name = config.optimizer.name
  if name not in OPTIMIZERS:
    raise ValueError(
        f"optimizer.name {name!r} is unknown: choose from {sorted(OPTIMIZERS)}")
  return OPTIMIZERS[name](config, shapes)


def advantage(config: config_dict.ConfigDict) -> Callable[..., Any]:
  """The estimator named by config.advantage."""
  if config.advantage not in ADVANTAGES:
    raise ValueError(
        f"advantage {config.advantage!r} is unknown: choose from"
        f" {sorted(ADVANTAGES)}")
  return ADVANTAGES[config.advantage]


def adam_state_bytes(trained: Any) -> int:
  """Bytes of dense Adam's moments for the leaves that are trained."""
  state = jax.eval_shape(optax.adam(1e-3).init, trained)
  return sum(
      leaf.size * jnp.dtype(leaf.dtype).itemsize
      for leaf in jax.tree.leaves(state))
