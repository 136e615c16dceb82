"""A run folder in Python: `Run`."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from safetensors import safe_open

from fedveil import strategies
from fedveil.attacks.audit.runner import audit_run
from fedveil.attacks.audit.schedule import TimeBudget
from fedveil.attacks.samples import AuditDataSource
from fedveil.cards.card import PrivacyCard, read_card
from fedveil.cards.hub_upload import push_to_hub
from fedveil.config import RunConfig, parse
from fedveil.console.runs import audit_output, final_model, privacy_statements
from fedveil.console.runs.run_reader import RunView, load_run, status_of
from fedveil.console.web.report import run_page
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.errors import ConfigError, StateError
from fedveil.privacy.guarantee_source import guarantee_of
from fedveil.records.atomic_files import fill_folder
from fedveil.records.tensor_state import load_state
from fedveil.runs.audit_outcome import AuditOutcome
from fedveil.runs.round_metrics import bound_epsilon, round_rows
from fedveil.server_app.validation_split import read_test_split

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Run"]


@final
class Run:
    """A run as recorded in its folder: over gRPC or in one process; finished, failed or still running.

    Every property rereads the folder, so it is up to date while the run is in progress.
    """

    def __init__(self, folder: str | Path, owner: object = None) -> None:
        """Open the run in a folder; `owner` keeps a temporary folder alive. Raises StateError if there is no run."""
        self.folder, self._owner = Path(folder).expanduser(), owner
        status_of(self.folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}): {self.state}"

    @property
    def state(self) -> str:
        """Return "running", "completed", "failed", "stopped" or "died"; "" if no state has been recorded yet."""
        return str(status_of(self.folder).get("state", ""))

    @property
    def config(self) -> RunConfig:
        """Return the run config. Raises StateError if there is none yet, ConfigError if another version wrote it."""
        return parse(self._config_file(load_run(self.folder))["config"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return one row per round, numbered from 1; fedveil/runs/round_metrics.py lists the columns."""
        run = load_run(self.folder)
        claim, config = self._claim(run)
        return round_rows(run.before, run.attempts, claim, config)

    def metrics_frame(self) -> DataFrame:
        """Return `metrics` as a pandas DataFrame, with the round as its index. Raises ConfigError without pandas."""
        if importlib.util.find_spec("pandas") is None:
            raise ConfigError(
                "pandas: it is not installed, and metrics_frame needs it; pip install pandas, or use metrics"
            )
        import pandas as pd

        rows = self.metrics
        return pd.DataFrame(rows).set_index("round") if rows else pd.DataFrame()

    @property
    def scores(self) -> dict[str, float]:
        """Return the final server model's scores; while the run is in progress, the latest scores."""
        return dict(load_run(self.folder).final)

    @property
    def epsilon(self) -> dict[str, float]:
        """Return, by site, an upper bound on the epsilon charged to any record; {} without a privacy guarantee.

        It holds against everyone but the site itself, and is infinite if no bound is known. `privacy` puts it in words.
        """
        run = load_run(self.folder)
        claim, config = self._claim(run)
        return bound_epsilon(claim, config, run.attempts) if claim and config else {}

    @property
    def privacy(self) -> list[str]:
        """Return sentences that state the guarantee and its bound for each site, as in the report."""
        return privacy_statements.privacy_statements(load_run(self.folder))

    @property
    def models(self) -> dict[str, Weights]:
        """Return the final weights by view: "server" and any others of the method. Raises StateError before the end.

        The same folder contains the PEFT or transformers files, with the same weights under those libraries' names.
        """
        return {
            file.stem: load_state(file).tensors
            for file in sorted(self._final().glob("*.safetensors"))
            if _is_state(file)
        }

    @property
    def card(self) -> PrivacyCard:
        """Return the privacy card of the final model. Raises StateError if there is none."""
        return read_card(self._final())

    def evaluate(
        self, data: str | Path, split: str = "test", generate: bool = False, device: str = "auto", base: str = ""
    ) -> dict[str, float]:
        """Return the final model's scores on examples: always "loss"; with `generate`, also those of generated texts.

        Args:
            data: folder or file of examples.
            split: the split of the folder. Under evaluate.validation-share, examples like those that chose the model
                are left out of "test", and are "validation" in a folder without such a split.
            generate: whether to generate texts, which takes longer.
            device: "auto", "cpu" or "cuda".
            base: path of the base model on this machine; "" means the run config's task.model.

        Raises:
            StateError: the run has no final model.
            TaskError: the folder, the split or a column is missing.
        """
        model = final_model.load_final_model(self.folder, base, eval_examples=sys.maxsize)
        task, weights = model.task(device)
        divided = read_test_split(task, model.config, Path(data).expanduser(), split)
        return task.evaluate(weights, divided.test, generate)

    def audit(
        self,
        data: str | Path | None = None,
        sites: Mapping[str, str | Path] | None = None,
        non_members: str | Path | None = None,
        max_rows: int = 300,
        seed: int = 0,
        minutes: float | None = None,
        canaries: tuple[str, str | Path] | None = None,
        device: str = "auto",
        say: Callable[[str], None] = lambda text: None,
    ) -> AuditOutcome:
        """Attack the run using its captured messages, with controls, and write audit.json, like `fedveil audit`.

        Args:
            data: the folder that the sites divide, as in the run config, sites sorted by name; None means task.data.
            sites: alternatively, each site's own examples.
            non_members: similar examples that no site has; None: those beyond task.examples-per-site, or split "test".
            max_rows: maximum number of members, and of non-members.
            seed: seed for the sample and the bootstrap.
            minutes: start no attack after this many minutes; the controls are trained regardless.
            canaries: a site, and the folder with the canaries planted in its examples.
            device: "auto", "cpu" or "cuda".
            say: called with progress messages.

        Raises:
            StateError: the run did not capture its messages, or has no final model.
            ConfigError: there are too few examples.
        """
        run = load_run(self.folder)
        config = parse(self._config_file(run)["config"])
        source = AuditDataSource(
            _path(data), {name: Path(of).expanduser() for name, of in (sites or {}).items()}, _path(non_members),
            max_rows, seed,
        )  # fmt: skip
        planted = None if canaries is None else (canaries[0], Path(canaries[1]).expanduser())
        report, sheet = audit_run(
            self.folder, config, run.sites, source, device, say, TimeBudget.of_minutes(minutes), planted
        )
        audit_output.write_audit(self.folder, report, sheet)
        return AuditOutcome(self.folder, report)

    def report(self, file: str | Path = "report.html") -> Path:
        """Write the same page as `fedveil report` and return its path."""
        path = Path(file).expanduser()
        run_page.write_run_page(path, [load_run(self.folder)])
        return path.absolute()

    def save(self, folder: str | Path) -> Path:
        """Copy the final model and its card to a new folder that PEFT or transformers can load. Return its path.

        Raises:
            StateError: the run has no final model yet, or the folder is not empty.
        """
        final_folder, into = self._final(), Path(folder).expanduser()
        if into.exists() and (not into.is_dir() or any(into.iterdir())):
            raise StateError(f"{into}: the folder is not empty; choose another")
        with fill_folder(into) as scratch:
            shutil.copytree(final_folder, scratch, dirs_exist_ok=True)
        return into.absolute()

    def push_to_hub(self, repo: str, token: str, is_public: bool = False) -> str:
        """Upload the final model and its card to the Hugging Face Hub, like `fedveil push`. Return the commit's URL.

        Raises:
            StateError: the run has no final model or card yet, or a file differs from its signed version.
            ConfigError: the Hub refuses, or the repository's visibility does not match `is_public`.
        """
        return push_to_hub(self._final(), repo, token, is_public)

    def _final(self) -> Path:
        folder = self.folder / "final"
        if not (folder / "server.safetensors").is_file():
            raise StateError(
                f"run folder {self.folder}: it has no final/server.safetensors, which a run writes when it ends; wait "
                "for the run to end, or resume it"
            )
        return folder

    def _claim(self, run: RunView) -> tuple[PrivacyGuarantee | None, RunConfig | None]:
        """Return the run's guarantee and config; (None, None) before the run has a config."""
        if "method" not in run.config:
            return None, None
        config = parse(run.config["config"])
        method = strategies.create_from_json(run.method, json.dumps(run.config["method"]["fields"]))
        return guarantee_of(method, config), config

    def _config_file(self, run: RunView) -> Mapping[str, Any]:
        if "config" not in run.config:
            raise StateError(
                f"run folder {self.folder}: config.json, which every started run has, is missing; choose another folder"
            )
        return run.config


def _is_state(file: Path) -> bool:
    """Return whether a file contains a state in FedVeil's own format, rather than another library's weights."""
    with safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call,unused-ignore]
        return "scalars" in (opened.metadata() or {})


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path).expanduser()
