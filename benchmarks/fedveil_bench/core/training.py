"""Measure tokens per second in local LoRA training, compared with a bare PyTorch loop over the same rows.

The bare loop is plain transformers and peft, without any FedVeil training code: its batches are on the device before
the clock starts, and it waits for the device once, at the end. Both sides have the same model, adapter, precision and
rows in each batch; their repeats alternate in one process, and the sides take turns going first. The first repeat of
each side is not counted, and all repeats use the same batches, because the first use of a length on a GPU waits for its
kernel plans. On a GPU, one more repeat of each side is profiled; its values are not used for anything else.

"tokens" counts the rows' tokens, without padding. "seconds_around" is the training time outside the steps: loading and
returning weights, and the loss of the received weights. "working_mb" is the GPU's peak memory beyond its initial
memory.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedveil import config, resources, rng
from fedveil.adapters.lora import LoraAdapter
from fedveil.attacks.statistics import confidence_interval
from fedveil.contract.task import TrainingProgress
from fedveil.data import batches
from fedveil.data.batches import TokenExample
from fedveil.models import loading
from fedveil.tasks.text_generation import TextGeneration
from fedveil.testing.training import quiet_libraries
from fedveil_bench.common.federations import task_of
from fedveil_bench.runner import BenchOptions, BenchOutcome

_ASKED = 0.97  # required fraction of the bare loop's tokens per second, on a GPU
_LEARNING_RATE = 1e-4
_WEIGHT_DECAY = 1e-6
_SEED = 20240229


@dataclass(frozen=True)
class _Measured:
    tokens_per_second: float
    tokens: int
    seconds_around: float = 0.0
    working_mb: float = 0.0


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row per variant, with FedVeil's and the bare loop's figures. `options.device` sets device and size."""
    device = loading.pick_device(options.device)
    is_cuda = device.type == "cuda"
    if not is_cuda:
        settings = settings | settings["cpu"]
    rows = _rows(settings)
    measured: dict[str, list[tuple[_Measured, _Measured]]] = {}
    profiles: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        _save_model(Path(folder), settings, device)
        for name, keys in settings["variants"].items():
            options.say(f"{name}: loading")
            setup = _Setup(folder, rows, settings, keys, device)
            ours, bare = _Ours(setup), _Bare(setup)
            if ours.parameters != bare.parameters:
                raise RuntimeError(
                    f"expected adapters of one size, found {ours.parameters} and {bare.parameters} weights"
                )
            measured[name] = []
            for repeat in range(settings["repeats"] + 1):
                first, second = (ours, bare) if repeat % 2 else (bare, ours)
                by = {side: _peak(side, device) for side in (first, second)}
                pair = by[ours], by[bare]
                label = f"repeat {repeat}" if repeat else "warm-up"
                options.say(
                    f"{name}: {label}: {pair[0].tokens_per_second:,.0f} and {pair[1].tokens_per_second:,.0f} tokens/s"
                )
                if repeat:
                    measured[name].append(pair)
            if is_cuda and name == "default":
                profiles = {"ours": _profile(ours), "bare": _profile(bare)}
            del ours, bare, by, first, second
            if is_cuda:
                torch.cuda.empty_cache()
    found = [_row(name, pairs, is_cuda) for name, pairs in measured.items()]
    found += [{"name": f"profile: {side}", **profile} for side, profile in profiles.items()]
    size = f"{settings['layers']} layers, {settings['width']} wide, a vocabulary of {settings['vocabulary']:,}"
    about = (
        f"Measured on {device.type} in {_precision(device)}: {size}; batches of {settings['batch']} rows of at most "
        f"{settings['tokens']} tokens."
    )
    return BenchOutcome(found, [about, *_verdicts(found, device)])


def _row(name: str, pairs: Sequence[tuple[_Measured, _Measured]], is_cuda: bool) -> dict[str, Any]:
    values = {
        "tokens_per_second": [ours.tokens_per_second for ours, _ in pairs],
        "bare_tokens_per_second": [bare.tokens_per_second for _, bare in pairs],
        "ratio": [ours.tokens_per_second / bare.tokens_per_second for ours, bare in pairs],
        "seconds_around": [ours.seconds_around for ours, _ in pairs],
    }
    if is_cuda:
        values["working_mb"] = [ours.working_mb for ours, _ in pairs]
        values["bare_working_mb"] = [bare.working_mb for _, bare in pairs]
    metrics = {key: confidence_interval(of) | {"median": statistics.median(of)} for key, of in values.items()}
    speed, bare = metrics["tokens_per_second"]["median"], metrics["bare_tokens_per_second"]["median"]
    metrics["ratio"]["of_medians"] = speed / bare
    return {"name": name, "metrics": metrics, "tokens": pairs[0][0].tokens}


def _verdicts(rows: Sequence[Mapping[str, Any]], device: torch.device) -> list[str]:
    rows = [row for row in rows if "metrics" in row]
    medians = {row["name"]: {key: m["median"] for key, m in row["metrics"].items()} for row in rows}
    ratios = {row["name"]: row["metrics"]["ratio"]["of_medians"] for row in rows}
    default = medians["default"]
    held = "held" if ratios["default"] >= _ASKED else "NOT HELD"
    asked = f"asked: at least {_ASKED}, {held}" if device.type == "cuda" else f"at least {_ASKED} is asked on a GPU"
    lines = [
        f"default: {default['tokens_per_second']:,.0f} tokens/s, the bare loop "
        f"{default['bare_tokens_per_second']:,.0f}: a ratio of {ratios['default']:.3f} ({asked})."
    ]
    for name, of in medians.items():
        if name != "default":
            line = f"{name}: {ratios[name]:.3f} of the bare loop with the same switched on, "
            line += f"{of['tokens_per_second'] / default['tokens_per_second']:.2f} times the speed of the default"
            if "working_mb" in of:
                line += f", {of['working_mb'] / default['working_mb']:.2f} times its working memory"
            lines.append(f"{line}.")
    return lines


def _precision(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def _rows(settings: Mapping[str, Any]) -> list[TokenExample]:
    """Return random tokens with sentence-like lengths (median: two fifths of the longest); two thirds are targets."""
    draw = random.Random(_SEED)
    rows = []
    for _ in range(settings["batch"] * settings["batches"]):
        length = min(settings["tokens"], max(8, round(draw.lognormvariate(0.0, 0.5) * 0.4 * settings["tokens"])))
        rows.append(TokenExample(draw.choices(range(1, settings["vocabulary"]), k=length), length // 3))
    return rows


def _save_model(folder: Path, settings: Mapping[str, Any], device: torch.device) -> None:
    """Save a GPT-2 with random weights and the tiny base's tokenizer, whose IDs fit into every vocabulary used here."""
    with quiet_libraries(), torch.random.fork_rng(devices=[]):
        from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

        tokenizer = AutoTokenizer.from_pretrained(
            str(resources.base_folder("text-generation")), local_files_only=True, trust_remote_code=False
        )
        shape = GPT2Config(
            vocab_size=settings["vocabulary"], n_positions=settings["tokens"], n_embd=settings["width"],
            n_layer=settings["layers"], n_head=max(1, settings["width"] // 64), resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        torch.manual_seed(_SEED)
        model = GPT2LMHeadModel(shape)
        if device.type == "cuda":
            model = model.bfloat16()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class _Setup:
    """The setup for both sides: a saved model, rows, the preset's settings and a variant's run config keys."""

    folder: str
    rows: list[TokenExample]
    settings: Mapping[str, Any]
    keys: Mapping[str, Any]
    device: torch.device


class _Ours:
    """FedVeil's own training, as run by a client."""

    def __init__(self, of: _Setup) -> None:
        fixed = {
            "task.model": of.folder,
            "task.max-tokens": of.settings["tokens"],
            "train.batch-size": of.settings["batch"],
            "train.precision": _precision(of.device),
            "train.learning-rate": _LEARNING_RATE,
            "train.weight-decay": _WEIGHT_DECAY,
        }
        lora = LoraAdapter(rank=of.settings["rank"])
        task = task_of(TextGeneration, config.parse(fixed | dict(of.keys)), BenchOptions(device=str(of.device)), lora)
        self._task, self._rows = task, of.rows
        self._start = task.initial(rng.initial_stream(_SEED, "benchmark"))
        self.parameters = sum(weight.numel() for weight in self._start.values())

    def train(self) -> _Measured:
        seen: list[TrainingProgress] = []
        local = self._task.trainer(self._rows, rng.initial_stream(_SEED, "batches"), seen.append)
        report = local.train(self._start).report
        last = seen[-1]
        return _Measured(last.tokens / last.seconds, last.tokens, report["train_seconds"] - last.seconds)


class _Bare:
    """The minimal loop without FedVeil."""

    def __init__(self, of: _Setup) -> None:
        self._rows, self._device, self._batch = of.rows, of.device, of.settings["batch"]
        self._accumulate, self._by_length = (
            of.keys.get("train.gradient-accumulation-steps", 1),
            of.keys.get("train.bucketing", False),
        )
        with quiet_libraries(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses an older name in the model
            from peft import LoraConfig, get_peft_model
            from transformers import AutoModelForCausalLM

            dtype = torch.bfloat16 if of.device.type == "cuda" else torch.float32
            model = AutoModelForCausalLM.from_pretrained(of.folder, dtype=dtype, trust_remote_code=False)
            model.loss_type = "ForCausalLM"  # the default; if it is not set, the model logs a message
            if of.keys.get("train.gradient-checkpointing", False):
                # Renamed in transformers 5.23; older versions use the older name.
                enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
                enable({"use_reentrant": False})
            lora = LoraConfig(r=of.settings["rank"], lora_alpha=16, target_modules="all-linear", fan_in_fan_out=True)
            model = get_peft_model(model, lora).to(of.device)
        # Without dropout, training and eval mode give the same result; only recomputation needs training mode.
        model.train(of.keys.get("train.gradient-checkpointing", False))
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in self._trained)
        self._model: Any = torch.compile(model, dynamic=True) if of.keys.get("train.compile", False) else model

    def train(self) -> _Measured:
        steps = self._steps()
        fused = True if self._device.type == "cuda" else None
        optimiser = torch.optim.AdamW(self._trained, lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY, fused=fused)
        losses = []
        self._wait()
        started = time.perf_counter()
        for step, terms in steps:
            for batch in step:
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
                    loss = self._model(**batch, num_items_in_batch=terms, use_cache=False).loss
                loss.backward()
                losses.append(loss.detach())
            optimiser.step()
            optimiser.zero_grad()
        self._wait()
        seconds = time.perf_counter() - started
        if not torch.isfinite(torch.stack(losses)).all():
            raise RuntimeError("the bare loop: expected finite losses, found NaN or infinity")
        tokens = sum(len(row.ids) for row in self._rows)
        return _Measured(tokens / seconds, tokens)

    def _steps(self) -> list[tuple[list[dict[str, torch.Tensor]], torch.Tensor]]:
        """Return an epoch on the device: each step's batches and their number of target tokens."""
        generator = rng.initial_stream(_SEED, "batches").torch_generator()
        drawn = batches.epoch_order(self._rows, self._batch, generator, self._by_length)  # same padding as in FedVeil
        rows = [self._rows[i] for i in drawn]
        cut = [rows[i : i + self._batch] for i in range(0, len(rows), self._batch)]
        steps = []
        for i in range(0, len(cut), self._accumulate):
            group = cut[i : i + self._accumulate]
            terms = sum(len(row.ids) - row.start for batch in group for row in batch)
            steps.append(([self._tensors(batch) for batch in group], torch.tensor(terms, device=self._device)))
        return steps

    def _tensors(self, rows: Sequence[TokenExample]) -> dict[str, torch.Tensor]:
        shape = len(rows), max(len(row.ids) for row in rows)
        batch = {
            "input_ids": torch.zeros(shape),
            "attention_mask": torch.zeros(shape),
            "labels": torch.full(shape, -100),
        }
        batch = {name: value.long() for name, value in batch.items()}
        for i, row in enumerate(rows):
            ids = torch.tensor(row.ids)
            batch["input_ids"][i, : len(ids)] = ids
            batch["attention_mask"][i, : len(ids)] = 1
            batch["labels"][i, row.start : len(ids)] = ids[row.start :]
        return {name: value.to(self._device) for name, value in batch.items()}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _profile(side: _Ours | _Bare) -> dict[str, Any]:
    """Run one more repeat under torch's profiler; return GPU compute seconds, kernels, and the longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        started = time.perf_counter()
        side.train()
        seconds = time.perf_counter() - started
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "seconds": round(seconds, 4),
        "gpu_seconds": round(sum(event.self_device_time_total for event in events) / 1e6, 4),
        "kernels": sum(event.count for event in events),
        "longest": [
            {"name": event.key[:80], "count": event.count, "seconds": round(event.self_device_time_total / 1e6, 4)}
            for event in events[:10]
        ],
    }


def _peak(side: _Ours | _Bare, device: torch.device) -> _Measured:
    """Run one repeat; on a GPU, measure its peak memory."""
    if device.type != "cuda":
        return side.train()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    measured = side.train()
    peak = torch.cuda.max_memory_allocated(device)
    return _Measured(measured.tokens_per_second, measured.tokens, measured.seconds_around, (peak - before) / 1e6)
