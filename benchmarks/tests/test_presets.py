"""Presets: their runners can be imported, and everything that they name exists."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from fedveil import strategies
from fedveil.errors import ConfigError
from fedveil.training import text_metrics
from fedveil_bench import folders
from fedveil_bench import runner as run
from fedveil_bench.common import pictures, resampling, verdicts
from fedveil_bench.dp_fpl import federated_prompts
from fedveil_bench.dp_fpl.accuracy import ZERO
from fedveil_bench.dp_fpl.learning import FREQUENT


def preset(name: str) -> dict:
    return run.read_preset(name, "full")


def test_a_preset_that_is_like_another_has_the_settings_of_that_one_but_for_its_own():
    ours, theirs = preset("lora/viggo"), preset("lora/quality")
    own = tomllib.loads((folders.presets_folder() / "lora" / "viggo.toml").read_text())
    assert "runner" not in own
    assert ours["runner"] == theirs["runner"]
    assert (ours["title"], ours["differences"]) == (own["title"], own["differences"])
    kept, changed = ours["settings"], own["settings"]
    assert kept["methods"]["HetLoRA"] == theirs["settings"]["methods"]["HetLoRA"]
    assert kept["methods"]["RoLoRA, 2 x rounds"] == {"name": "rolora", "config": {"run.rounds": 24}}
    assert kept["config"] == theirs["settings"]["config"] | changed["config"]
    assert (kept["claims"], kept["margin"]) == (theirs["settings"]["claims"], 0.15)
    assert run.read_preset("lora/viggo", "quick")["settings"]["config"]["run.rounds"] == 2


@pytest.mark.parametrize("name", run.list_presets())
def test_a_preset_s_runner_can_be_imported_and_run(name):
    """A runner that asks a process for each seed has what the process calls."""
    runner = importlib.import_module(f"fedveil_bench.{preset(name)['runner']}")
    assert callable(runner.run_benchmark)
    if hasattr(runner, "seeds"):
        assert callable(runner.of_seed)


def formed(chosen: Callable[[str], bool]) -> list[tuple[str, run.Form]]:
    """Presets that are chosen by name, in each of their forms."""
    return [(name, form) for name in run.list_presets() if chosen(name) for form in run.check_forms(name)]


def is_run_by(runner: str) -> Callable[[str], bool]:
    return lambda name: preset(name)["runner"] == runner


@pytest.mark.parametrize("name", [n for n in run.list_presets() if n.startswith("dp_fpl/")])
def test_methods_and_claims_of_dp_fpl_exist(name):
    found = preset(name)
    rows = found["settings"].get("rows", {})
    for changes in ({}, *(found.get(form, {}).get("rows", {}) for form in ("small", "quick"))):
        assert set(changes) <= set(rows)
        for label, row in rows.items():
            strategies.create_method(row["name"], {**row, **changes.get(label, {})}.get("fields", ""))
    known = {
        *rows,
        ZERO,
        *([FREQUENT] if found["runner"] == "dp_fpl.learning" else []),
        *(federated_prompts.name_noise_control(label) for label, row in rows.items() if row.get("control") is True),
    }
    for claim in found["settings"].get("claims", []):
        assert {claim["row"], *([claim["than"]] if isinstance(claim["than"], str) else [])} <= known
    assert set(found.get("paper", {})) <= set(rows)


@pytest.mark.parametrize(("name", "form"), formed(lambda name: name.startswith(("fedrand/", "broadcast/", "lora/"))))
def test_claims_are_about_rows_and_parts_of_their_table(name, form):
    """In every form: a claim about what is not measured would end a run of hours with an error."""
    settings = run.read_preset(name, form)["settings"]
    rows = {"one client alone", *settings.get("methods", {}), *settings.get("rows", {})}
    rows |= {f"{label} {view}" for label in settings.get("methods", {}) for view in ("server", "client")}
    parts = tuple(f"{part['name']} " for part in settings.get("parts", []) if part["name"])
    for claim in settings.get("claims", []):
        assert {claim["row"], *([claim["than"]] if isinstance(claim["than"], str) else [])} <= rows
        assert not parts or claim["metric"].startswith(parts)


@pytest.mark.parametrize(("name", "form"), formed(is_run_by("fedrand.on_pictures")))
def test_every_score_that_a_table_on_pictures_asks_for_is_one_of_captions_or_of_answers(name, form):
    """Answers have accuracy alone; captions have everything else."""
    settings = run.read_preset(name, form)["settings"]
    for part in settings["parts"]:
        known = {"accuracy"} if pictures.is_choice(part["data"]) else {*text_metrics.CAPTIONS}
        assert set(part["metrics"]) <= {"test loss", *known}, part


@pytest.mark.parametrize(("name", "form"), formed(is_run_by("fedrand.on_pictures")))
def test_a_target_on_curves_is_one_that_its_table_can_have(name, form):
    """In every form: one that no row has would end a run of hours with an error."""
    settings = run.read_preset(name, form)["settings"]
    metrics = {f"{part['name']} test loss".strip() for part in settings["parts"] if part.get("test_rows")}
    for target in settings.get("curve_targets", []):
        assert settings["curve_every"] > 0
        assert target["row"] in {f"{label} server" for label in settings["methods"]}
        assert target["metric"] in metrics
        assert target["margin"] > 0


@pytest.mark.parametrize(("name", "form"), formed(is_run_by("fedrand.on_texts")))
def test_a_target_on_curves_of_texts_is_a_method_s_loss(name, form):
    settings = run.read_preset(name, form)["settings"]
    for target in settings.get("curve_targets", []):
        assert settings["curve_every"] > 0
        assert (target["row"] in settings["methods"], target["metric"]) == (True, "loss")
        assert target["margin"] > 0


def test_the_smaller_forms_of_fedrand_s_table_1_have_no_captions():
    """Too few pictures to learn any: a CIDEr of about 1 says nothing. The full form has all that the paper has."""
    forms = {
        form: run.read_preset("fedrand/table1", form)["settings"]["parts"] for form in run.check_forms("fedrand/table1")
    }
    full, small, quick = ({part["name"]: part for part in parts} for parts in forms.values())
    assert set(small) == set(quick) == {"qa"}
    assert set(full["coco"]["metrics"]) == {"test loss", *text_metrics.CAPTIONS}


@pytest.mark.parametrize("name", [n for n in run.list_presets() if preset(n)["runner"] == "fedqsn.proxies"])
def test_a_gap_s_control_trains_as_its_method_does_and_hides_nothing(name):
    """FedAvg of the same weights, under the same settings; so what is left of its gap is training alone."""
    for form in run.check_forms(name):
        methods = run.read_preset(name, form)["settings"]["methods"]
        for label, row in methods.items():
            made = strategies.create_method(row["name"], row.get("fields", ""))
            if "control" not in row:
                assert row["name"] in ("fedavg", "fedsp") or name in ("fedqsn/private", "fedqsn/table6"), label
                continue
            control = methods[row["control"]]
            assert control["name"] == "fedavg"
            assert strategies.create_method("fedavg", control.get("fields", "")).adapter == made.adapter
            assert control.get("config", {}) == row.get("config", {})


def test_the_tables_of_fedqsn_have_the_paper_s_rates_and_the_embeddings_apart():
    """Rates on both sides and on one, at w = 2; masks beside 4 bits; the head whole, as the paper's code leaves it."""
    shown, both = {}, ("fedqsn/table3", "fedqsn/table8")
    for name in both:
        methods = preset(name)["settings"]["methods"].values()
        made = [strategies.create_method(row["name"], row["fields"]) for row in methods if row["name"] == "fedqsn"]
        bits = [m.bits if m.quantiser != "none" else 0 for m in made]
        shown[name] = {(m.server_rate, m.client_rate, w, m.embeddings) for m, w in zip(made, bits, strict=True)}
    rates = [(0.1, 0.0), (0.0, 0.1), (0.1, 0.1), (0.1, 0.2), (0.2, 0.1), (0.2, 0.2)]
    assert shown["fedqsn/table3"] >= {(*p, 2, "masked") for p in rates}
    assert shown["fedqsn/table3"] >= {(0.1, 0.1, 2, "open"), (0.1, 0.1, 2, "quantised")}
    assert shown["fedqsn/table8"] >= {(p, p, w, "masked") for p in (0.1, 0.2) for w in (0, 4)}
    assert shown["fedqsn/table8"] >= {(p, p, 0, "open") for p in (0.1, 0.2)} | {(0.0, 0.0, 2, "quantised")}
    assert {preset(name)[part]["seeds"] for name in both for part in ("settings", "small")} == {3}


@pytest.mark.parametrize("name", [n for n in run.list_presets() if preset(n)["settings"].get("claims")])
def test_claims_of_the_presets_can_be_judged(name):
    """A claim of equality has its margin."""
    for claim in verdicts.claims_of(preset(name)["settings"]):
        assert verdicts.judge_claim(resampling.from_constant(0.0), claim).word in (verdicts.HOLDS, verdicts.FAILS)
        unbounded = claim | {"margin": 0.0 if "margin" in claim else 1.0}
        with pytest.raises(ConfigError, match="margin"):
            verdicts.judge_claim(resampling.from_constant(0.0), unbounded)


@pytest.mark.parametrize("name", ["april", "adaptive"])
def test_cases_of_the_presets_have_a_model_and_a_name_of_their_own(name):
    settings = preset(f"random_binary/{name}")
    cases = settings["settings"]["cases"]
    assert len({c["name"] for c in cases}) == len(cases)
    assert {c["model"] for c in cases} <= set(settings["settings"]["models"])
    assert all(("share" in c) == (c.get("expect") in ("read", "hidden")) for c in cases)
    skipped = [set(part.get("skip", [])) for part in (settings["settings"], settings["small"])]
    assert set(settings["quick"].get("skip", [])) <= {c["name"] for c in cases}
    assert set().union(*skipped) <= {c["name"] for c in cases}
    assert not skipped[0] & skipped[1]  # a case that no form has


@pytest.mark.parametrize("form", ["full", "small"])
def test_a_masked_batch_stands_beside_one_without_masks(form):
    """Of the same size, searched as long: else nobody knows whether the mask hid it or the batch."""
    settings = run.read_preset("random_binary/adaptive", form)["settings"]
    asked = [case for case in settings["cases"] if case["name"] not in settings["skip"]]

    def search(case):
        return case.get("batch", 1), case.get("matching", {}), case["model"]

    open_ = [search(case) for case in asked if case["method"].get("fields") == "rate = 0.0"]
    masked = [case for case in asked if case.get("batch", 1) > 1 and case["method"].get("fields") != "rate = 0.0"]
    assert masked
    assert all(search(case) in open_ for case in masked)


@pytest.mark.parametrize("name", ["accuracy", "vit_small"])
@pytest.mark.parametrize("form", ["full", "quick"])
def test_methods_and_claims_of_random_binary_exist_and_every_claim_has_its_rows(name, form):
    settings = run.read_preset(f"random_binary/{name}", form)["settings"]
    for row in settings["methods"].values():
        strategies.create_method(row["name"], settings["fields"] + row.get("fields", ""))
    rows = {(base, method) for base, of in settings["bases"].items() for method in of["methods"]}
    assert {method for _, method in rows} <= set(settings["methods"])
    pairs = [
        [(base, claim[side]) for side in ("row", "than")] for claim in settings["claims"] for base in claim["bases"]
    ]
    assert form == "quick" or all(set(pair) <= rows for pair in pairs)


@pytest.mark.parametrize("form", ["full", "quick"])
def test_the_control_of_random_binary_has_both_rows_and_seeds_to_decide_it(form):
    """In the quick form some bases have no rows."""
    settings = run.read_preset("random_binary/accuracy", form)["settings"]
    rows = {(base, method) for base, of in settings["bases"].items() for method in of["methods"]}
    (control,) = (c for c in settings["claims"] if c.get("control") and c["is"] == "lower")
    assert {("position", control["row"]), ("position", control["than"])} <= rows
    assert settings["bases"]["position"]["seeds"] >= resampling.SEEDS_TO_DECIDE


def test_quick_settings_replace_values_and_add_to_tables_also_to_one_that_is_not_there():
    changed = run._merged(
        {"a": 1, "config": {"x": 1, "y": 1}}, {"a": 2, "config": {"y": 2}, "called": {"cat": "animal"}}
    )
    assert changed == {"a": 2, "config": {"x": 1, "y": 2}, "called": {"cat": "animal"}}


def test_a_quick_form_is_the_small_one_made_smaller_and_says_of_both_how_they_differ(tmp_path, monkeypatch):
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "table.toml").write_text(
        'title = "x"\nrunner = "x"\ndifferences = ["all"]\nsmall_differences = ["small"]\n'
        'quick_differences = ["quick"]\n[settings]\na = 1\nb = 1\nc = 1\n[small]\nb = 2\nc = 2\n[quick]\nc = 3\n'
    )
    (tmp_path / "paper" / "other.toml").write_text('title = "y"\nrunner = "y"\n[settings]\na = 1\n[quick]\na = 2\n')
    monkeypatch.setattr(folders, "presets_folder", lambda: tmp_path)
    found = {form: run.read_preset("paper/table", form) for form in run.check_forms("paper/table")}
    assert {form: tuple(each["settings"].values()) for form, each in found.items()} == {
        "full": (1, 1, 1), "small": (1, 2, 2), "quick": (1, 2, 3)
    }  # fmt: skip
    assert [each["differences"] for each in found.values()] == [
        ["all"], ["all", "small"], ["all", "small", "quick", found["quick"]["differences"][-1]]
    ]  # fmt: skip
    assert "only shows that it works" in found["quick"]["differences"][-1]
    assert run.read_preset("paper/other", "quick")["settings"] == {"a": 2}
    with pytest.raises(ConfigError, match="--small: expected a preset that has this form, found paper/other"):
        run.read_preset("paper/other", "small")


def test_every_preset_has_a_form_to_see_it_work():
    assert [name for name in run.list_presets() if "quick" not in run.check_forms(name)] == []


def test_a_result_has_its_preset_its_form_and_the_seconds_of_the_whole(monkeypatch):
    seen = []

    def runs(settings, options):
        seen.append(settings["seeds"])
        return run.BenchOutcome([{"name": "x"}])

    monkeypatch.setattr(run, "load_runner", lambda preset: SimpleNamespace(run_benchmark=runs))
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=iter([5.0, 7.5]).__next__))
    result, files = run.run_preset("fedrand/e2e", run.BenchOptions(form="quick"))
    assert (result["preset"], result["form"], result["seconds"], files) == ("fedrand/e2e", "quick", 2.5, {})
    assert seen == [1]


def test_minutes_are_for_presets_whose_table_can_be_of_fewer_rows_alone():
    with pytest.raises(ConfigError, match="--minutes: expected a preset whose table"):
        run.run_preset("fedrand/rho", run.BenchOptions(minutes=1.0))
