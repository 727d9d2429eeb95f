"""Spelling backwards and palindromes on a small character model, on any CPU.

  python experiments/launch.py --config=configs/quickstart.py

A decoder of 2 million parameters learns both tasks from demonstrations most of
which are wrong, then reinforcement learning finds out which were right, on a
mesh of eight fake CPU devices and in minutes. `:short` is a smaller model on
the same tasks, cut to 90 seconds.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
  """The configuration; arg is "" or "short"."""
  if arg not in ("", "short"):
    raise ValueError(f"quickstart has no variant {arg!r}: use :short or none")
  task = lambda name, **fields: config_dict.ConfigDict(
      dict(name=name, **fields))
  config = config_dict.ConfigDict(dict(
      experiment="experiments.grpo",
      seed=0,
      # Fake devices; on real ones set platform to "" and the mesh to match.
      platform="cpu",
      devices=8,
      mesh=dict(data=4, fsdp=1, model=2, expert=1),
      model=dict(
          num_layers=4, embed_dim=192, num_heads=6, num_kv_heads=2,
          head_dim=32, mlp_dim=768, tied_head=True, remat=False),
      tasks=(
          task("spell_backward", corruption="wrong_letter",
               corrupted_share=0.65,
               params=dict(min_word_len=3, max_word_len=5)),
          task("palindrome_generation", corruption="dropped_letter",
               corrupted_share=0.65, params=dict(min_length=3, max_length=4)),
      ),
      data=dict(examples=8000, held_out=512, prompt_width=6),
      warm_start=dict(updates=600, batch_size=64, learning_rate=3e-3),
      rollout=dict(
          prompts=32, group_size=8, max_new_tokens=6, temperature=1.0),
      advantage="grpo",
      loss=dict(clip_low=0.2, clip_high=0.2, importance_cap=2.0),
      optimizer=dict(
          name="logra",
          # None is the ratio form, a number the learning-rate form.
          learning_rate=config_dict.placeholder(float),
          rank=32, basis="hadamard", refresh_every=1, b2=0.95,
          weight_ratio=5e-3, weight_decay=0.01, max_norm=1.0,
          kl_control=True, kl_budget=8e-3, max_scale=3.0,
          step_multiplier=1.0, seed=0),
      updates=200,
      microbatches=1,
      probe_rows=32,
      sync_check_every=20,
      eval_every=50,
      checkpoint_every=25,
      keep_last=2,
  ))
  if arg == "short":
    config.model.update(num_layers=2, embed_dim=96, num_heads=4, head_dim=24,
                        mlp_dim=256)
    config.warm_start.update(updates=250, learning_rate=5e-3)
    config.update(updates=40, eval_every=20)
  return config
