"""The picture of a run, from the scalars it left behind.

  python experiments/report.py runs/quickstart
"""

import json
import pathlib
import sys
from typing import Any

import matplotlib
import numpy as np
from matplotlib import figure
from matplotlib import ticker

# Okabe and Ito's colours: told apart under every common colour blindness.
BLUE, RED, FAINT, QUIET = "#0072B2", "#D55E00", "#C9C9C9", "#6B6B6B"
OTHERS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9")
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 11, "text.color": "#222222",
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": FAINT, "axes.labelcolor": QUIET, "axes.grid": True,
    "grid.color": "#EDEDED", "xtick.color": FAINT, "ytick.color": FAINT,
    "xtick.labelcolor": QUIET, "ytick.labelcolor": QUIET,
    "legend.frameon": False, "legend.labelcolor": QUIET,
}


def draw(workdir: pathlib.Path) -> pathlib.Path:
  """Draws `report.png`, 1600 x 1000 pixels, in a run's directory.

  Args:
    workdir: holds the run's `metrics.jsonl` and `summary.json`.

  Returns:
    The picture's path.

  Raises:
    OSError, LookupError, TypeError, ValueError: if these cannot be read or do
      not hold what a run writes.
  """
  text = (workdir / "metrics.jsonl").read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  summary = json.loads((workdir / "summary.json").read_text())
  updates = [line for line in lines if "reward" in line]
  evaluations = [line for line in lines if "accuracy" in line]
  last = max(1, *(line["step"] for line in lines))
  path = workdir / "report.png"
  with matplotlib.rc_context(STYLE):
    fig = figure.Figure(figsize=(16, 10), dpi=100, facecolor="white")
    fig.subplots_adjust(0.045, 0.065, 0.975, 0.82, wspace=0.18, hspace=0.42)
    axes = fig.subplots(2, 3)
    for ax in axes.flat:
      ax.set(xlabel="update", xlim=(-0.015 * last, 1.015 * last))
      ax.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    _headline(fig, summary, workdir.resolve().name)
    _trace(axes[0, 0], updates, "reward", top=1.02)
    _finish(axes[0, 0], "Training reward", "bold: smoothed")
    _accuracy(axes[0, 1], evaluations, last)
    _kl(axes[0, 2], updates, summary)
    _step_scale(axes[1, 0], updates)
    _bytes(axes[1, 1], summary)
    _trace(axes[1, 2], updates, "completion_length")
    _finish(axes[1, 2], "Completion length", "mean tokens; bold: smoothed")
    fig.savefig(path)
  return path


def _headline(fig, s, name):
  change = lambda k: f"{s[k + '_before']:.1%} → {s[k + '_after']:.1%}"
  count = lambda k: f"{s[k]:,} {k if s[k] != 1 else k[:-1]}"
  seconds, quiet = s["seconds"], {"size": 13, "color": QUIET}
  time = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
  facts = f"greedy {change('greedy')}", count("updates"), time, count("devices")
  fig.text(0.045, 0.945, f"Accuracy {change('accuracy')}", size=25, weight=700)
  fig.text(0.045, 0.91, "  ·  ".join(facts), **quiet)
  fig.text(0.975, 0.945, name, ha="right", parse_math=False, **quiet)


def _trace(ax, updates, key, top=None):
  steps, values = _column(updates, "step"), _column(updates, key)
  _line(ax, steps, values, color=BLUE, lw=0.8, alpha=0.4)
  _line(ax, steps, _smooth(values), color=BLUE, lw=2.4)
  ax.set_ylim(0, top)


def _accuracy(ax, evaluations, last):
  steps = _column(evaluations, "step")
  tasks = [k[9:] for k in (evaluations or [{}])[0] if k.startswith("accuracy/")]
  few = len(tasks) <= len(OTHERS)  # else colours would not tell them apart
  for name, dash in (("accuracy", "-"), ("greedy_accuracy", "--")):
    for i, task in enumerate(tasks):
      _line(ax, steps, _column(evaluations, f"{name}/{task}"), ls=dash, lw=1.2,
            color=OTHERS[i] if few else FAINT,
            label=task if few and dash == "-" else None)
    _line(ax, steps, _column(evaluations, name), color=BLUE, lw=2.8, ls=dash)
  both = np.array([_column(evaluations, k) for k in (
      "accuracy", "greedy_accuracy")]).T
  for i, shift, side in ((0, -6, "right"), (-1, 6, "left"))[:len(both)]:
    ends = np.sort(both[i][np.isfinite(both[i])])
    for value, va in zip(ends, ("top", "bottom"), strict=False):
      ax.annotate(f"{value:.1%}", (steps[i], value), (shift, 0), ha=side, va=va,
                  textcoords="offset points", color=BLUE, weight="bold")
  ax.set(xlim=(-0.16 * last, 1.16 * last), ylim=(0, 1.08))
  ax.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
  _finish(ax, "Held-out accuracy",
          "solid: temperature 1, dashed: greedy; bold: overall, thin: a task")


def _kl(ax, updates, summary):
  seen = []
  for name, style in (("budget", {"color": FAINT, "lw": 6}),
                      ("realised", {"color": OTHERS[0], "lw": 1.3}),
                      ("predicted", {"color": BLUE, "lw": 1.3})):
    median = summary.get(f"kl_{name}_median")
    values = _column(updates, f"kl_{name}")
    seen.append(np.where(values > 0, values, np.nan))  # the axis is in logs
    _line(ax, _column(updates, "step"), seen[-1], **style,
          label=name + (f", median {median:.1e}" if median else ""))
  if np.isfinite(seen).any():
    # Six decades at most: one update that hardly moved must not flatten all.
    ax.set(yscale="log", ylim=(max(
        np.nanmin(seen) / 3, np.nanmax(seen) / 1e6), np.nanmax(seen) * 2))
  _finish(ax, "KL of each update", "old ‖ new policy, nats per token")


def _step_scale(ax, updates):
  steps, scale, kl, budget = (_column(updates, k) for k in (
      "step", "step_scale", "kl_predicted", "kl_budget"))
  _line(ax, steps, np.where(scale > 0, scale, np.nan), color=BLUE, lw=1.3)
  # Only at the cap does an update leave part of the budget unspent.
  capped = scale[(scale > 0) & (kl > 0) & (kl < 0.99 * budget)]
  if capped.size:
    ax.axhline(capped.max(), color=QUIET, lw=1, ls="--",
               label=f"cap {capped.max():.3g}")
  ax.set_ylim(0)
  refused = [line["step"] for line in updates if line.get("refused")]
  if refused:
    ax.vlines(refused, 0, 0.06, RED, lw=1.6, label=f"refused: {len(refused)}",
              transform=ax.get_xaxis_transform())
  off = not any("step_scale" in line for line in updates)
  _finish(ax, "Step scale α", "KL control is off: every update as it comes" if
          off else "what KL control multiplied each update by")


def _bytes(ax, summary):
  rows = (("optimizer_state_bytes", "optimiser state"),
          ("dense_adam_state_bytes", "dense Adam's state"),
          ("sync_bytes_per_update", "policy sync"),
          ("full_sync_bytes", "full sync"))
  for i, (key, name) in enumerate(rows):
    size, y, ours = summary[key], i + 0.5 * (i // 2), i % 2 == 0
    power = int(np.log2(max(size, 1)) // 10)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    label = f"{name}  {size / 1024 ** power:.3g} {unit}"
    if ours:
      label += f",  {size / max(summary[rows[i + 1][0]], 1):.1%} of"
    ax.barh(y, size, 0.45, color=BLUE if ours else FAINT)
    ax.text(0, y - 0.28, label, color=BLUE if ours else QUIET,
            weight="bold" if ours else None)
  ax.set(xlim=(0, None), ylim=(3.8, -0.6), xlabel="", xticks=[])
  ax.spines[["left", "bottom"]].set_visible(False)
  ax.yaxis.set_visible(False)
  _finish(ax, "Memory and traffic", "beside dense Adam and a full copy")


def _column(lines, key):
  """One scalar of every line; NaN where it is null or absent."""
  return np.array([line.get(key) for line in lines], float)


def _line(ax, steps, values, **style):
  """A line, if there is one; points without neighbours show as dots."""
  finite = np.pad(np.isfinite(values), 1)
  alone = finite[1:-1] & ~finite[:-2] & ~finite[2:]
  if finite.any():
    ax.plot(steps, values, **style)
    ax.plot(steps[alone], values[alone], ".", color=style["color"], ms=7)


def _smooth(values):
  """Gaussian mean over about a twentieth of the run; bridges short gaps."""
  width = max(1.0, len(values) / 40)
  reach = int(min(3 * width, max(len(values) - 1, 0) // 2))
  kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
  finite = np.isfinite(values)
  total, weight = (np.convolve(x, kernel, "same") for x in (
      np.where(finite, values, 0.0), finite.astype(float)))
  seen = weight > 0.3 * kernel.sum()
  return np.where(seen, total / np.where(seen, weight, 1.0), np.nan)


def _finish(ax, title, subtitle):
  ax.set_title(f"{title}\n", loc="left", weight="bold", size=13)
  ax.text(0, 1.04, subtitle, color=QUIET, transform=ax.transAxes)
  if ax.get_legend_handles_labels()[1]:
    ax.legend(loc="best")


def main(argv: list[str]) -> int:
  """Draws the run that the command line names. Returns the exit code."""
  try:
    print(draw(pathlib.Path(argv[-1])))
  except (OSError, LookupError, TypeError, ValueError) as error:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"error: cannot draw {argv[-1]!r} ({reason}): give the directory of a"
          " finished run", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
