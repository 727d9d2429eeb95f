"""The walk: sample, score, estimate, update, synchronise; one loop.

Only the trainer's `state`, the rollout `worker` and a scalar baseline outlive
an iteration. A checkpoint holds the first and the last, for the worker is a
copy and everything random is drawn from (seed, purpose, step).
"""

import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import config_dict

from experiments import build
from experiments import report
from experiments import resume
from experiments import sft
from logra_jax import __version__
from logra_jax import checkpoint
from logra_jax import fingerprint
from logra_jax import keys
from logra_jax import metrics
from logra_jax import sharding
from logra_jax.data import prompts
from logra_jax.models import cache
from logra_jax.models import transformer
from logra_jax.rl import rewards
from logra_jax.rl import sampler
from logra_jax.rl import step as step_lib
from logra_jax.rl import sync
from logra_jax.rl import types


class Programs(NamedTuple):
  """The compiled calls of a run."""
  state: Any  # shapes and shardings of a TrainState
  init: Any  # params -> TrainState
  sample: Any  # (params, prompts, key, temperature) -> Rollout of a group
  evaluate: Any  # the same, one completion of every held-out prompt
  update: Any  # (state, rollout, advantages) -> (state, delta, stats)
  follow: Any  # (worker, delta) -> worker
  fingerprint: Any  # params -> hash


class Run(NamedTuple):
  """The checked pieces of a run; nothing is compiled yet."""
  config: config_dict.ConfigDict
  mesh: Mesh
  tokenizer: Any
  data: build.Data
  demonstrations: sft.Demonstrations
  model: build.Model
  optimizer: build.Optimizer
  advantage: Any


def prepare(config: config_dict.ConfigDict) -> Run:
  """Builds and checks everything a configuration names.

  Raises:
    ValueError: one line naming the wrong value and the remedy.
  """
  build.check_numbers(config)
  mesh = build.mesh(config)
  tokenizer = build.tokenizer()
  advantage = build.advantage(config)
  model = build.model(config, mesh, tokenizer.vocab_size)
  optimizer = build.optimizer(config, model.shapes)
  data = build.data(config)
  return Run(
      config, mesh, tokenizer, data, sft.demonstrations(config, data), model,
      optimizer, advantage)


def run(
    r: Run,
    workdir: pathlib.Path,
    cache_dir: pathlib.Path,
    stop: resume.Stop | None = None,
) -> dict[str, Any] | None:
  """Post-trains a model and reports; goes on from the newest checkpoint.

  Args:
    r: from `prepare`.
    workdir: receives `metrics.jsonl`, `checkpoints`, `summary.json` and
      `report.png`.
    cache_dir: of warm starts.
    stop: says when to save and leave early.

  Returns:
    The summary, None if the run left early.
  """
  stop = resume.Stop() if stop is None else stop
  started = time.time()
  with jax.set_mesh(r.mesh), rewards.Scorer() as scorer, checkpoint.Checkpoints(
      workdir / resume.CHECKPOINTS, r.config.keep_last,
      tqdm.tqdm.write) as checkpoints:
    programs = _compile(r)
    found = checkpoints.restore(programs.state)
    if found is None:
      params = sft.warm_start(
          r.config, r.mesh, r.model, r.demonstrations, cache_dir)
      found = checkpoint.Restored(0, programs.init(params), {
          "baseline": 0.0, "position": None, "sync_mismatches": 0,
          "seconds": 0.0, "code": __version__})
    else:
      checkpoints.set_aside(found.step)
      _announce(found)
    clock = started - found.record["seconds"]
    with stop, metrics.Writer(
        workdir / "metrics.jsonl", found.record["position"]) as writer:
      reached, mismatches = _walk(
          r, programs, found, scorer, writer, checkpoints, clock, stop)
    saved = checkpoints.wait()
  if reached < r.config.updates:
    print(f"stopped by {stop.reason()} after update {reached};"
          f" {'saved' if saved else 'NOT saved'}: the same command goes on")
    return None
  summary = _summary(r, programs, metrics.read(workdir / "metrics.jsonl")) | {
      "sync_mismatches": mismatches, "seconds": round(time.time() - clock, 1)}
  metrics.write_json(workdir / "summary.json", summary)
  picture = report.draw(workdir)
  print(
      f"accuracy {summary['accuracy_before']:.1%} ->"
      f" {summary['accuracy_after']:.1%} (greedy {summary['greedy_before']:.1%}"
      f" -> {summary['greedy_after']:.1%}) after {summary['updates']} updates"
      f" and {summary['seconds']:.0f} s; picture: {picture}")
  return summary


def _announce(found):
  print(f"goes on after update {found.step}")
  if found.record["code"] != __version__:
    print(f"warning: it was begun by version {found.record['code']} of this"
          f" code and goes on with {__version__}: bits may differ")


def _walk(r, programs, found, scorer, writer, checkpoints, clock, stop):
  """Updates until the last or until stopped. -> (updates made, mismatches)."""
  config, state = r.config, found.tree
  worker = _new_worker(state)
  baseline = jnp.asarray(found.record["baseline"], jnp.float32)
  mismatches = found.record["sync_mismatches"]
  evaluate = functools.partial(_evaluate, r, programs, scorer)
  if found.record["position"] is None:
    writer.write(0, evaluate(worker.params))
  group = config.rollout.group_size
  bar = tqdm.trange(
      found.step, config.updates, initial=found.step, total=config.updates,
      desc="grpo", unit="update")
  done = found.step
  for step in bar:
    started = time.time()

    # Prompts.
    chosen = prompts.select(
        len(r.data.train), config.rollout.prompts, config.seed, step)
    examples = [r.data.train[i] for i in chosen]
    batch = _prompt_batch(r, examples)

    # Sample.
    rollout = programs.sample(
        worker.params, batch, keys.make(config.seed, "sample", step),
        config.rollout.temperature)

    # Score: the only hop to the host.
    reward, counts = scorer.score(
        [e for e in examples for _ in range(group)],
        _completions(r.tokenizer, rollout))

    # Advantages.
    advantages, baseline = r.advantage(reward.reshape(-1, group), baseline)

    # Update.
    state, delta, stats = programs.update(
        state, rollout, advantages.reshape(-1))

    # Synchronise.
    if int(worker.version) != int(delta.parent):
      raise RuntimeError(
          f"a delta of version {int(delta.parent)} reached a worker at"
          f" {int(worker.version)}")
    worker = programs.follow(worker, delta)
    done, last = step + 1, step + 1 == config.updates
    due = lambda every, at=done, last=last: last or (every and at % every == 0)
    if due(config.sync_check_every):
      worker, differed = _check_identity(programs, state, worker)
      mismatches += differed

    # Measure.
    stats = _host(stats) | _rollout_stats(rollout, reward, counts, started)
    writer.write(done, stats)
    bar.set_postfix(
        reward=f"{stats['reward']:.2f}", kl=f"{stats['kl_realised']:.1e}",
        tokens_s=f"{stats['tokens_per_second']:.0f}")
    accuracy = None
    if due(config.eval_every):
      evaluation = evaluate(worker.params)
      writer.write(done, evaluation)
      accuracy = evaluation["accuracy"]

    # Checkpoint: what was evaluated, and every so often.
    leaving = stop.reason() is not None
    if leaving or accuracy is not None or due(config.checkpoint_every):
      checkpoints.save(done, state, {
          "baseline": float(baseline), "position": writer.position(),
          "sync_mismatches": mismatches, "seconds": time.time() - clock,
          "code": __version__}, accuracy)
    if leaving:
      break
  return done, mismatches


def _compile(r):
  """Jitted programs with their shardings; nothing runs yet."""
  config = r.config
  graph, model_sharding = r.model.graph, r.model.shardings
  rows = NamedSharding(r.mesh, sharding.ACTIVATIONS["batch"])
  whole = NamedSharding(r.mesh, P())
  init = lambda params: types.TrainState(
      jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32), params,
      r.optimizer.tx.init(r.optimizer.trained(params)))
  shapes = jax.eval_shape(init, r.model.shapes)
  state_sharding = types.TrainState(
      whole, whole, model_sharding, sharding.named(sharding.state_specs(
          shapes.opt_state, r.model.shapes, r.mesh), r.mesh))
  sample = lambda group_size: jax.jit(
      functools.partial(
          sampler.sample, functools.partial(transformer.decode, graph),
          functools.partial(cache.init, r.model.config),
          group_size=group_size, eos_id=r.tokenizer.eos_id,
          max_new_tokens=config.rollout.max_new_tokens),
      in_shardings=(model_sharding, rows, whole, whole), out_shardings=rows)
  update = functools.partial(
      step_lib.train_step,
      completion_logits=functools.partial(
          transformer.completion_logits, graph),
      tx=r.optimizer.tx,
      trainable=jax.tree.map(lambda g: g != "frozen", r.optimizer.groups),
      temperature=config.rollout.temperature,
      microbatches=config.microbatches,
      probe_rows=config.probe_rows,
      **config.loss)
  return Programs(
      state=jax.tree.map(
          lambda s, sharding: jax.ShapeDtypeStruct(
              s.shape, s.dtype, sharding=sharding), shapes, state_sharding),
      init=jax.jit(init, out_shardings=state_sharding),
      sample=sample(config.rollout.group_size),
      evaluate=sample(1),
      update=jax.jit(
          update, donate_argnums=0, in_shardings=(state_sharding, rows, None),
          out_shardings=(state_sharding, None, whole)),
      follow=jax.jit(
          sync.apply, donate_argnums=0,
          out_shardings=types.Worker(whole, model_sharding)),
      fingerprint=jax.jit(fingerprint.fingerprint))


def _prompt_batch(r, examples):
  return prompts.pad(
      [e.prompt for e in examples], r.tokenizer, r.config.data.prompt_width)


def _evaluate(r, programs, scorer, params):
  """Accuracy on the held-out prompts, sampled and greedy, overall and by task.

  The keys are the same at every evaluation: what changes is the policy.
  """
  examples = r.data.held_out
  batch = _prompt_batch(r, examples)
  found = {}
  for name, temperature in (("accuracy", 1.0), ("greedy_accuracy", 0.0)):
    rollout = programs.evaluate(
        params, batch, keys.make(r.config.seed, "evaluate", 0), temperature)
    reward, _ = scorer.score(examples, _completions(r.tokenizer, rollout))
    found[name] = float(np.mean(reward == 1.0))
    for task in r.config.tasks:
      of_task = np.array([e.task == task.name for e in examples])
      found[f"{name}/{task.name}"] = float(np.mean(reward[of_task] == 1.0))
  return found


def _completions(tokenizer, rollout):
  """The text of every completion; a row's padding is not part of it."""
  tokens, mask = jax.device_get((rollout.tokens, rollout.completion_mask))
  return [
      tokenizer.decode(row[keep])
      for row, keep in zip(tokens[:, -mask.shape[1]:], mask, strict=True)]


def _check_identity(programs, state, worker):
  """(worker, 0) if it holds the trainer's bits, else (a full resync, 1)."""
  ours, theirs = (
      int(programs.fingerprint(x.params)) for x in (state, worker))
  if ours == theirs:
    return worker, 0
  tqdm.tqdm.write(
      f"warning: the worker's weights at version {int(worker.version)} differ"
      f" from the trainer's at {int(state.version)}; resynchronised in full")
  return _new_worker(state), 1


def _new_worker(state):
  """A worker with a full copy of the trainer's weights."""
  copy = functools.partial(jax.tree.map, jnp.copy)
  return types.Worker(copy(state.version), copy(state.params))


def _host(stats):
  return {k: v.item() for k, v in jax.device_get(stats).items()}


def _rollout_stats(rollout, reward, counts, clock):
  mask = jax.device_get(rollout.completion_mask)
  seconds = time.time() - clock
  return {
      "reward": float(np.mean(reward)),
      "completion_length": float(mask.sum(1).mean()),
      "truncated": float(1.0 - np.mean(jax.device_get(rollout.finished))),
      "seconds": seconds,
      "tokens_per_second": float(mask.sum() / seconds),
      **{f"reward_{name}": count for name, count in counts.items()},
  }


def _delta(r, programs):
  """The shapes of what an update sends."""
  c = r.config
  shape = (c.rollout.prompts, c.data.prompt_width)
  batch = types.PromptBatch(*(
      jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, bool)))
  rollout = jax.eval_shape(
      programs.sample, r.model.shapes, batch, keys.make(c.seed, "sample", 0),
      c.rollout.temperature)
  advantages = jax.ShapeDtypeStruct(rollout.finished.shape, jnp.float32)
  return jax.eval_shape(programs.update, programs.state, rollout, advantages)[1]


def _summary(r, programs, lines):
  history = [line for line in lines if "reward" in line]
  evaluations = [line for line in lines if "accuracy" in line]
  first, last = evaluations[0], evaluations[-1]
  def median(name):
    values = [h[name] for h in history if h.get(name) is not None]
    return float(np.median(values)) if values else None
  return {
      "accuracy_before": first["accuracy"],
      "accuracy_after": last["accuracy"],
      "greedy_before": first["greedy_accuracy"],
      "greedy_after": last["greedy_accuracy"],
      "updates": len(history),
      "devices": r.mesh.size,
      "refused": sum(h["refused"] for h in history),
      "kl_predicted_median": median("kl_predicted"),
      "kl_realised_median": median("kl_realised"),
      "sync_bytes_per_update": sync.message_bytes(_delta(r, programs)),
      "full_sync_bytes": sync.message_bytes(programs.state.params),
      "optimizer_state_bytes": sync.message_bytes(programs.state.opt_state),
      "dense_adam_state_bytes": build.adam_state_bytes(
          r.optimizer.trained(r.model.shapes)),
  }
