"""Supervised warm start: maximum likelihood on demonstrations, cached."""

import functools
import hashlib
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from ml_collections import config_dict

from experiments import build
from logra_jax import keys
from logra_jax import sharding
from logra_jax.data import prompts
from logra_jax.data import tasks
from logra_jax.models import transformer
from logra_jax.rl import losses

# Raised when the same configuration would train to other weights.
_VERSION = 1


class Demonstrations(NamedTuple):
  """Prompts and answers, laid out as rollouts are; NumPy arrays."""
  tokens: np.ndarray  # [M, S + T] int32
  mask: np.ndarray  # [M, S + T] bool
  targets: np.ndarray  # [M, T] bool, answer tokens, EOS included


def warm_start(
    config: config_dict.ConfigDict,
    mesh: Mesh,
    model: build.Model,
    rows: Demonstrations,
    cache_dir: pathlib.Path,
) -> Any:
  """Weights trained on demonstrations, from the cache if they are there.

  Args:
    config: of the run; model, tasks, data, warm_start, mesh and seed name the
      cache entry.
    mesh: to train on.
    model: the decoder.
    rows: from `demonstrations`.
    cache_dir: shared by every run that compares.

  Returns:
    The weights, sharded as the model's.
  """
  entry = cache_dir / f"warm_start_{_fingerprint(config)}"
  checkpointer = ocp.StandardCheckpointer()
  if entry.exists():
    target = jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(
            s.shape, s.dtype, sharding=sharding),
        model.shapes, model.shardings)
    print(f"warm start: from the cache, {entry}")
    return checkpointer.restore(entry, target)
  params = _train(config, mesh, model, rows)
  checkpointer.save(entry, params)
  checkpointer.wait_until_finished()
  return params


def _train(config, mesh, model, rows):
  c = config.warm_start
  init = jax.jit(
      lambda key: transformer.init(model.config, key)[1],
      out_shardings=model.shardings)
  params = init(keys.make(config.seed, "init", 0))
  tx = optax.adamw(
      optax.warmup_cosine_decay_schedule(
          0.0, c.learning_rate, min(20, c.updates // 10), c.updates),
      b2=0.99, weight_decay=0.01)
  state_shardings = sharding.named(
      sharding.state_specs(
          jax.eval_shape(tx.init, model.shapes), model.shapes, mesh), mesh)
  state = jax.jit(tx.init, out_shardings=state_shardings)(params)
  batch_sharding = NamedSharding(mesh, sharding.ACTIVATIONS["batch"])
  update = jax.jit(
      functools.partial(_update, model.graph, tx), donate_argnums=(0, 1),
      out_shardings=(model.shardings, state_shardings, None))
  bar = tqdm.trange(c.updates, desc="warm start", unit="update")
  for step in bar:
    chosen = prompts.select(
        len(rows.tokens), c.batch_size, config.seed, step)
    batch = jax.device_put(tuple(x[chosen] for x in rows), batch_sharding)
    params, state, loss = update(params, state, *batch)
    if step % 10 == 0 or step == c.updates - 1:
      bar.set_postfix(loss=f"{float(loss):.3f}")
  return params


def _update(graph, tx, params, state, tokens, mask, targets):
  width = targets.shape[-1]
  def loss(params):
    logits = transformer.completion_logits(graph, params, tokens, mask, width)
    logprobs = losses.token_logprobs(logits, tokens[:, -width:])
    return -jnp.sum(jnp.where(targets, logprobs, 0.0)) / jnp.sum(targets)
  value, gradient = jax.value_and_grad(loss)(params)
  updates, state = tx.update(gradient, state, params)
  return optax.apply_updates(params, updates), state, value


def demonstrations(
    config: config_dict.ConfigDict, data: build.Data
) -> Demonstrations:
  """Every training prompt with an answer, some of them wrong by design.

  Raises:
    ValueError: if a prompt or an answer does not fit its width.
  """
  tokenizer = build.tokenizer()
  pairs = []
  for task in config.tasks:
    pairs += tasks.demonstrations(
        [e for e in data.train if e.task == task.name],
        task.corrupted_share, task.corruption, config.seed)
  width = config.rollout.max_new_tokens
  batch = prompts.pad(
      [p for p, _ in pairs], tokenizer, config.data.prompt_width)
  answers = np.zeros((len(pairs), width), np.int32)
  targets = np.zeros((len(pairs), width), bool)
  for row, (_, answer) in enumerate(pairs):
    ids = [*tokenizer.encode(answer), tokenizer.eos_id]
    if len(ids) > width:
      raise ValueError(
          f"answer {answer!r} and EOS take {len(ids)} tokens, more than"
          f" rollout.max_new_tokens {width}: raise it")
    answers[row, :len(ids)] = ids
    targets[row, :len(ids)] = True
  return Demonstrations(
      np.concatenate([batch.tokens, answers], 1),
      np.concatenate([batch.mask, targets], 1), targets)


def _fingerprint(config):
  """Names everything that the warm start's weights depend on."""
  fields = {name: config[name] for name in (
      "seed", "model", "tasks", "data", "warm_start", "mesh")}
  fields["width"] = config.rollout.max_new_tokens
  fields["code"] = _VERSION
  text = json.dumps(
      config_dict.ConfigDict(fields).to_json_best_effort(), sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
