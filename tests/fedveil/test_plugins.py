"""Methods and tasks by name: files of the rooms alone, and what another installed package brings."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from fedveil import rng, strategies, tasks
from fedveil.config import parse
from fedveil.contract.task import DatasetShard
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from tests.conftest import ROOT

METHOD = """
from dataclasses import dataclass
from fedveil.strategies.fedavg import FedAvg

@dataclass(frozen=True)
class WardAverage(FedAvg):
    "FedAvg, as a ward calls it."
    floor: float = 0.5
"""
TASK = """
import json
import torch
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.task import Example, Task, TaskInfo, ignore_progress
from fedveil.contract.trainer import TrainingResult

INFO = TaskInfo(mounts=("layers",), columns=lambda task: (task.target_column,), tiny=lambda: None)

def create(config, adapter, device):
    return Heights(config)

class Heights(Task):
    "The mean of one column; training goes all the way to it."
    spec = {"h.lora_A": ParamSpec((1,)), "h.lora_B": ParamSpec((1,))}

    def __init__(self, config):
        self.column = INFO.columns(config.task)[0]

    def initial(self, rng):
        return {name: torch.zeros(1) for name in self.spec}

    def examples(self, data, split, share=None):
        rows = [json.loads(line) for line in (data / f"{split}.jsonl").read_text().splitlines()]
        return [Example(row) for row in (rows if share is None else rows[share.index :: share.count])]

    def encode(self, examples):
        return [float(example.values[self.column]) for example in examples]

    def trainer(self, rows, rng, watch=ignore_progress, round_=0):
        return ToTheMean(self.spec, rows)

    def evaluate(self, weights, examples, generate):
        return {"loss": float((weights["h.lora_B"] - torch.tensor(self.encode(examples))).square().mean())}

    def predict(self, weights, rows, generate=False):
        raise NotImplementedError

class ToTheMean:
    def __init__(self, spec, rows):
        self.spec, self.rows, self.num_examples = spec, rows, len(rows)

    def train(self, weights, frozen=None, penalty=None):
        mean = sum(self.rows) / len(self.rows)
        return TrainingResult({name: torch.full_like(w, mean) for name, w in weights.items()}, {})
"""


def install(site, name: str, **points: str) -> None:
    """A distribution in the folder `site`, as pip would leave it; `points`: group to lines."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    text = "".join(f"[fedveil.{group}]\n{lines}\n" for group, lines in points.items())
    (info / "entry_points.txt").write_text(text)


@pytest.fixture
def ward(tmp_path, monkeypatch):
    """One method and one task of somebody else's."""
    (tmp_path / "ward_average.py").write_text(METHOD)
    (tmp_path / "ward_heights.py").write_text(TASK)
    install(tmp_path, "ward", methods="ward-average = ward_average", tasks="heights = ward_heights")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("ward_average", "ward_heights"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("room, names", [(strategies, strategies.list_methods), (tasks, tasks.list_tasks)])
def test_names_are_those_of_the_files(room, names):
    folder = ROOT / room.__name__.replace("fedveil.strategies", "strategies").replace(".", "/")
    files = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert {name.replace("-", "_") for name in names()} == files


@pytest.mark.parametrize("name", ["scratch", "layers", "progress", "text_generation", "__init__", "adapted", "", "os"])
def test_what_is_no_task_is_refused(name):
    config = parse({"task.name": name})
    for asked in (
        lambda: tasks.load_task(config, strategies.create_method("fedavg").adapter),
        lambda: tasks.task_info(name),
    ):
        with pytest.raises(
            ConfigError,
            match=rf'task.name: found "{name}"; .*expected one of \[.*"?\]; .* install the package that provides it',
        ):
            asked()


@pytest.mark.parametrize("name", tasks.list_tasks())
def test_every_task_says_what_it_reads_and_takes(name):
    info, task = tasks.task_info(name), parse({}).task
    assert info.mounts
    known = {task.source_column, task.target_column, task.rejected_column, task.image_column}
    assert set(info.columns(task)) <= known
    assert (task.rejected_column in info.columns(task)) == (name == "preference")
    assert info.tiny() is None or info.tiny().is_dir()
    asked = parse({"task.choices-column": "choices", "task.hint-column": "hint"}).task
    assert ({"choices", "hint"} <= set(info.columns(asked))) == (name == "vision-language")


def test_a_method_and_a_task_of_another_package_run(ward, tmp_path):
    """Heights 1 to 12, cut in three: the mean of the sites' means by their numbers of rows is 6.5, after one round."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"cm": n}) + "\n" for n in range(1, 13)))
    assert "ward-average" in strategies.list_methods()
    assert "heights" in tasks.list_tasks()
    flat = {"method.name": "ward-average", "task.name": "heights", "task.target-column": "cm", "run.rounds": 1}
    config = parse({**flat, "method.params": "floor = 0.25"})
    method = strategies.create_method(config.method.name, config.method.params)
    assert method.floor == 0.25
    task = tasks.load_task(config, method.adapter, "cpu")
    rows = {f"site-{i}": task.encode(task.examples(tmp_path, "train", DatasetShard(i, 3))) for i in range(3)}
    start = method.init(task.spec, task.initial(rng.initial_stream(0, "w")), rng.initial_stream(0, "m"))
    exchange = MessageExchange(method, config.method.name, task.spec)
    federation = InProcessFederation(
        exchange, config, lambda site, ctx: task.trainer(rows[site], ctx.rng("b")), sorted(rows), start
    )
    federation.run()
    assert federation.models()["server"]["h.lora_B"] == torch.tensor([6.5])
    assert task.evaluate(federation.models()["server"], task.examples(tmp_path, "train"), False)["loss"] > 0


def test_a_site_without_the_package_says_so():
    with pytest.raises(
        ConfigError,
        match=r'method.name: found "ward-average"; .* install the package that provides it on this machine',
    ):
        strategies.create_method("ward-average")


def test_no_package_takes_the_place_of_a_file(ward):
    install(ward, "impostor", methods="fedavg = ward_average", tasks="text-generation = ward_heights")
    assert strategies.load_method("fedavg").__module__ == "fedveil.strategies.fedavg"
    assert tasks.task_info("text-generation").mounts == ("layers", "cache")


def test_two_packages_with_one_name_are_refused(ward):
    install(ward, "other-ward", methods="ward-average = ward_average")
    with pytest.raises(
        ConfigError, match=r'method.name: expected one package that provides "ward-average", found .*other-ward'
    ):
        strategies.load_method("ward-average")


@pytest.mark.parametrize(
    "lines,match",
    [
        ("x = no_such_module", '"x" of the package broken .*does not load: No module named'),
        (
            "x = ward_heights:Heights",
            '"x" of the package broken must be a module with INFO and create, but is <class',
        ),
        ("x = ward_average", '"x" of the package broken must be a module with INFO and create, but is <module'),
    ],
)
def test_an_entry_point_that_does_not_fit_is_refused(ward, lines, match):
    install(ward, "broken", tasks=lines)
    with pytest.raises(ConfigError, match=f"task.name: {match}"):
        tasks.task_info("x")


def test_a_module_with_no_method_or_with_two_is_refused(ward):
    install(ward, "broken", methods="none = ward_heights\ntwo = ward_two")
    (ward / "ward_two.py").write_text(METHOD + "class Second(WardAverage): ...\n")
    for name, count in (("none", 0), ("two", 2)):
        with pytest.raises(ConfigError, match=f'of "{name}" must define exactly one Method, but defines {count}'):
            strategies.load_method(name)


@pytest.mark.long
def test_a_new_process_finds_them_too(ward):
    """As a site's client process does, which imports nothing before it is asked."""
    code = "from fedveil import strategies, tasks; print(strategies.load_method('ward-average'), tasks.list_tasks())"
    path = f"{ward}:{':'.join(p for p in sys.path if p)}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": path}, check=True
    )
    assert "ward_average.WardAverage" in done.stdout
    assert "heights" in done.stdout


def test_of_a_name_that_is_spelled_nearly_right_the_other_is_asked():
    with pytest.raises(ConfigError, match=r'found "fedrnd"; did you mean fedrand\? expected one of'):
        strategies.load_method("fedrnd")
