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

# Okabe and Ito's colours: told apart under every common colour blindness.
BLUE, RED, FAINT, QUIET = "#0072B2", "#D55E00", "#C9C9C9", "#6B6B6B"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
OTHERS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9")
STYLE: Any = {
    "font.size": 11, "text.color": "#222222", "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": FAINT, "axes.grid": True,
    "axes.labelcolor": QUIET, "grid.color": "#EDEDED", "legend.frameon": False,
    "xtick.color": FAINT, "xtick.labelcolor": QUIET, "ytick.color": FAINT,
    "ytick.labelcolor": QUIET}


def draw(workdir: pathlib.Path) -> pathlib.Path:
  """Draws `report.png`, 1600 x 1000 pixels, in a run's directory.

  Args:
    workdir: holds the run's `metrics.jsonl` and `summary.json`.

  Returns:
    The picture's path.

  Raises:
    OSError, LookupError, TypeError, ValueError: if it holds no finished run.
  """
  text = (workdir / "metrics.jsonl").read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  summary = json.loads((workdir / "summary.json").read_text())
  updates = [line for line in lines if "reward" in line]
  evaluations = [line for line in lines if "accuracy" in line]
  last = max([1, *(line["step"] for line in lines)])
  with matplotlib.rc_context(STYLE):
    fig = figure.Figure(figsize=(16, 10), dpi=100)
    fig.subplots_adjust(0.045, 0.065, 0.975, 0.82, wspace=0.18, hspace=0.42)
    axes = fig.subplots(2, 3)
    for ax in axes.flat:
      ax.set(xlabel="update", xlim=(-0.015 * last, 1.015 * last))
      ax.locator_params("x", nbins=6, integer=True)
    _headline(fig, summary, workdir.resolve().name)
    _trace(axes[0, 0], updates, "reward", 1.02, "Training reward")
    _accuracy(axes[0, 1], evaluations, last)
    _kl(axes[0, 2], updates, summary)
    _step_scale(axes[1, 0], updates)
    _bytes(axes[1, 1], summary)
    _trace(axes[1, 2], updates, "completion_length", None, "Completion tokens")
    fig.savefig(path := workdir / "report.png")
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


def _trace(ax, updates, key, top, title):
  values = _column(updates, key)
  _line(ax, updates, values, color=BLUE, lw=0.8, alpha=0.4)
  _line(ax, updates, _smooth(values), color=BLUE, lw=2.4)
  ax.set_ylim(0, top)
  _title(ax, title, "mean of each update, bold: smoothed")


def _accuracy(ax, evaluations, last):
  tasks = [k[9:] for k in (evaluations or [{}])[0] if k.startswith("accuracy/")]
  few = 0 < len(tasks) <= len(OTHERS)  # more than that look alike
  ys = []
  for name, dash in (("accuracy", "-"), ("greedy_accuracy", "--")):
    for i, task in enumerate(tasks):
      _line(ax, evaluations, _column(evaluations, f"{name}/{task}"), ls=dash,
            color=OTHERS[i] if few else FAINT, lw=1.2,
            label=task if dash == "-" else None)
    ys.append(_column(evaluations, name))
    _line(ax, evaluations, ys[-1], color=BLUE, lw=2.8, ls=dash)
  for i, side in ((0, "right"), (-1, "left"))[:len(evaluations)]:
    # The lower number below its point, the higher above: they never collide.
    for va, y in zip(("top", "bottom"), sorted(x[i] for x in ys), strict=True):
      ax.text(evaluations[i]["step"], y, f" {y:.1%} " if y == y else "",
              ha=side, va=va, color=BLUE, weight="bold")
  ax.set(xlim=(-0.2 * last, 1.2 * last), ylim=(0, 1.08))
  ax.yaxis.set_major_formatter("{x:.0%}")
  _title(ax, "Held-out accuracy",
         "solid: temperature 1, dashed: greedy, thin: each task", few)


def _kl(ax, updates, summary):
  seen = []
  for name, color, width in (("budget", FAINT, 6), ("realised", OTHERS[0], 1.3),
                             ("predicted", BLUE, 1.3)):
    values = _column(updates, f"kl_{name}")
    seen.append(np.where(values > 0, values, np.nan))  # the axis is in logs
    median = summary.get(f"kl_{name}_median")
    _line(ax, updates, seen[-1], color=color, lw=width,
          label=name + (f", median {median:.1e}" if median else ""))
  if np.isfinite(seen).any():
    # Six decades at most: one update that hardly moved must not flatten all.
    low, high = np.nanmin(seen), np.nanmax(seen)
    ax.set(yscale="log", ylim=(max(low / 3, high / 1e6), high * 2))
  _title(ax, "KL of each update", "old ‖ new policy, nats per token", True)


def _step_scale(ax, updates):
  scale, kl, budget = (
      _column(updates, k) for k in ("step_scale", "kl_predicted", "kl_budget"))
  notes = "multiplies each update" if any(
      "step_scale" in line for line in updates) else "KL control is off"
  _line(ax, updates, np.where(scale > 0, scale, np.nan), color=BLUE, lw=1.3)
  # Only at the cap does an update leave part of the budget unspent.
  capped = scale[(scale > 0) & (kl > 0) & (kl < 0.99 * budget)]
  if capped.size:
    ax.axhline(capped.max(), color=QUIET, lw=1, ls="--")
    notes += f", dashed: cap {capped.max():.3g}"
  ax.set_ylim(0)
  if refused := [line["step"] for line in updates if line.get("refused")]:
    ax.vlines(refused, 0, 0.06, RED, transform=ax.get_xaxis_transform())
    notes += f", red: {len(refused)} refused"
  _title(ax, "Step scale α", notes)


def _bytes(ax, summary):
  names = "optimiser state", "dense Adam's state", "policy sync", "full sync"
  sizes = [summary[k] for k in (
      "optimizer_state_bytes", "dense_adam_state_bytes",
      "sync_bytes_per_update", "full_sync_bytes")]
  for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
    y, ours = i + 0.4 * (i // 2), i % 2 == 0
    power = int(np.log2(max(size, 1)) // 10)
    label = f"{name}  {size / 1024 ** power:.3g} {UNITS[power]}"
    if ours:
      label += f",  {size / max(sizes[i + 1], 1):.1%} of {names[i + 1]}"
    ax.barh(y, size, 0.45, color=BLUE if ours else FAINT)
    ax.text(0, y - 0.29, label, color=BLUE if ours else QUIET)
  ax.set(xlim=(0, max(1, *sizes)), ylim=(3.65, -0.6))
  ax.set_axis_off()
  _title(ax, "Memory and traffic", "beside dense Adam and a full copy")


def _column(lines, key):
  """One scalar of every line; NaN where it is null or absent."""
  return np.array([line.get(key) for line in lines], float)


def _line(ax, lines, values, **style):
  """A line, if there is one; points without neighbours show as dots."""
  finite = np.pad(np.isfinite(values), 1)
  alone = finite[1:-1] & ~finite[:-2] & ~finite[2:]
  if finite.any():
    steps = _column(lines, "step")
    ax.plot(steps, values, **style)
    ax.plot(steps[alone], values[alone], ".", color=style["color"], ms=7)


def _smooth(values):
  """Mean under a bell a tenth of the run wide; bridges short gaps."""
  kernel = np.hanning((len(values) // 10 | 1) + 2)[1:-1]
  finite = np.isfinite(values)
  total = np.convolve(np.where(finite, values, 0.0), kernel, "same")
  weight = np.convolve(finite, kernel, "same")
  return total / np.where(weight > 0.3 * kernel.sum(), weight, np.nan)


def _title(ax, title, subtitle, legend=False):
  ax.set_title(f"{title}\n", loc="left", weight="bold", size=13)
  ax.text(0, 1.04, subtitle, color=QUIET, transform=ax.transAxes)
  if legend and ax.get_lines():
    ax.legend()


def main(argv: list[str]) -> int:
  """Draws the run that the command line names. Returns the exit code."""
  try:
    print(draw(pathlib.Path(argv[-1])))
  except (OSError, LookupError, TypeError, ValueError) as error:
    print(f"error: cannot draw {argv[-1]!r} ({error!r}): give the directory of"
          " a finished run", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
