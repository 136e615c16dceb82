"""A user's own model file: find it, check its source, run it.

A run names the file in `task.module`. It is `fedveil/own/<name>.py` in the app, so the bundle's digest covers it. For a
run in one process, `LocalFederation` accepts a file from anywhere.

The source check finds mistakes and tells the author what a file may use. It is not a sandbox, because code that can
call torch can do anything. A site pins the file's digest in its policy, or the digest of the whole bundle.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import fedveil.own
from fedveil.config import RunConfig
from fedveil.contract.task import Metrics, TaskMetric
from fedveil.errors import ConfigError, TaskError

__all__ = ["OwnModule", "find_module", "load_module", "register_file", "score_directions", "with_own_task"]

MAX_BYTES = 100_000
NEEDED = {"model": (), "loss": ("model", "batch"), "dataset": ("folder", "split")}
OPTIONAL = {"collate": ("rows",), "metrics": ("model", "batches"), "predict": ("model", "batch")}
PERMITTED_IMPORTS = frozenset((
    "PIL", "__future__", "collections", "csv", "dataclasses", "datasets", "functools", "itertools", "json", "math",
    "monai", "numpy", "pandas", "pathlib", "peft", "random", "re", "scipy", "sklearn", "torch", "torchvision",
    "transformers", "typing", "zlib",
))  # fmt: skip
_CALLS = frozenset(("eval", "exec", "compile", "breakpoint", "input"))
_ATTRIBUTES = frozenset(("write_text", "write_bytes", "unlink", "rmdir", "rename", "trust_remote_code"))
_OF_TORCH = frozenset(("load", "save", "hub", "package", "jit"))
_REGISTERED: dict[str, Path] = {}


@dataclass(frozen=True)
class OwnModule:
    """A checked and loaded file.

    Attributes:
        name: its name in the run config.
        text: its source, as it runs here.
        functions: its functions by name; optional ones may be absent.
        better: for each score from `metrics`, whether higher or lower is better.
        independent_rows: whether the author declares that dataset() computes each row from that row alone.
        lora_targets: names of the layers that get low-rank pairs; empty = all linear layers.
    """

    name: str
    text: str
    functions: Mapping[str, Callable[..., Any]] = field(repr=False)
    better: Mapping[str, Literal["higher", "lower"]]
    independent_rows: bool
    lora_targets: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Return "sha256:" and the SHA-256 of the file."""
        return module_digest(self.text.encode())

    def needs_base(self, function: str) -> bool:
        """Return whether the function has a parameter `base`, which gets task.model."""
        found = self.functions.get(function)
        return found is not None and "base" in inspect.signature(found).parameters


def module_digest(content: bytes) -> str:
    """Return the digest by which instructions and policies identify a file."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def with_own_task(settings: Mapping[str, object], trains_base: bool = True) -> dict[str, object]:
    """Return a run's settings; with a task.module, add the task's name, and all weights as the adapter.

    If task.module is a path, it is registered for this process and replaced by the file's name. Keys that are already
    set do not change, nor do settings without a task.module. `trains_base`: whether the method accepts all weights.
    """
    completed = dict(settings)
    module = str(completed.get("task.module", ""))
    if not module:
        return completed
    if module.endswith(".py"):
        completed["task.module"] = register_file(Path(module).expanduser())
    completed.setdefault("task.name", "own-model")
    if trains_base and "adapter" not in str(completed.get("method.params", "")):
        given = str(completed.get("method.params", ""))
        completed["method.params"] = "\n".join(filter(None, [given, 'adapter.kind = "all"']))
    return completed


def register_file(file: Path) -> str:
    """Register `file` so that this process finds it by its name; return the name. Raises ConfigError if missing."""
    if not file.is_file():
        raise ConfigError(f'task.module: there is no Python file at "{file}"; set it to the model\'s file')
    _REGISTERED[file.stem] = file.resolve()
    return file.stem


def find_module(name: str) -> Path:
    """Return the file of `task.module`. Raises ConfigError if there is none."""
    if not name:
        raise ConfigError('task.module: task.name = "own-model" requires a file; set it')
    file = _REGISTERED.get(name) or Path(next(iter(fedveil.own.__path__))) / f"{name}.py"
    if not file.is_file():
        raise ConfigError(f"task.module: this app has no file {name}.py; copy it to fedveil/own/")
    return file


def score_directions(name: str) -> Metrics:
    """Return the loss and the scores in a file's `better`, read from its source without running it."""
    file = find_module(name)
    directions = _literals(_parsed(read_text(file), file.name)).get("better", {})
    return {"loss": TaskMetric("lower")} | {
        key: TaskMetric(value) for key, value in _checked_better(directions, file.name).items()
    }


def load_module(config: RunConfig) -> OwnModule:
    """Check and run the file of `config.task.module`.

    Raises:
        ConfigError: there is no such file.
        TaskError: the file has a mistake; the error names its line.
    """
    file = find_module(config.task.module)
    text = read_text(file)
    tree = _parsed(text, file.name)
    check_text(tree, file.name)
    literals = _literals(tree)
    better = _checked_better(literals.get("better", {}), file.name)
    module = types.ModuleType(f"fedveil_own_{config.task.module}")
    # Cache the file's lines for tracebacks, in case the file changes on disk.
    linecache.cache[str(file)] = (len(text), None, text.splitlines(keepends=True), str(file))
    sys.modules[module.__name__] = module  # dataclasses and type hints look their module up
    try:
        exec(compile(text, str(file), "exec"), module.__dict__)
    except Exception as error:
        raise explain_error(error, file.name, "the file", "correct it") from error
    functions = {name: vars(module)[name] for name in NEEDED | OPTIONAL if callable(vars(module).get(name))}
    _check_functions(functions, file.name)
    if "metrics" in functions and not better:
        raise TaskError(
            f'task.module: {file.name} has metrics() but not better = {{"score": "higher"}}; add it, with "higher" '
            'or "lower" for each score'
        )
    targets = getattr(module, "lora_targets", ())
    if isinstance(targets, str) or not all(isinstance(each, str) for each in targets):
        raise TaskError(
            f"task.module: lora_targets in {file.name} must be a list of layer names, found "
            f'{type(targets).__name__}; write ["name"]'
        )
    independent = getattr(module, "independent_rows", False) is True
    return OwnModule(config.task.module, text, functions, better, independent, tuple(targets))


def read_text(file: Path) -> str:
    """Return the file's text. Raises TaskError for a file that is too large or not UTF-8."""
    content = file.read_bytes()
    if len(content) > MAX_BYTES:
        raise TaskError(
            f"task.module: {file.name} has {len(content)} bytes, but at most {MAX_BYTES} are allowed; shorten it"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise TaskError(f"task.module: {file.name} is not UTF-8 text; convert it") from error


def explain_error(error: Exception, file: str, where: str, advice: str) -> TaskError:
    """Return the error for an exception in the file, with its type and line but not its text, which may quote a row."""
    return TaskError(f"task.module: {where} failed with {describe_error(error, file)}; {advice}")


def describe_error(error: Exception, file: str) -> str:
    """Return an exception's type and the last line in the file that it passed through."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    line = next((frame.lineno for frame in frames if Path(frame.filename).name == file), None)
    return f"{type(error).__name__} in {file}, line {line}" if line else f"{type(error).__name__} in {file}"


def check_text(tree: ast.Module, file: str) -> None:
    """Raise TaskError, with the line number, for a statement that an own model's file must not contain."""
    for node in ast.walk(tree):
        for found in _barred(node):
            raise TaskError(
                f"task.module: {file} must not contain {found} (line {getattr(node, 'lineno', 0)}); remove it, and "
                "see docs/tasks/own-model.md for what a file may use"
            )


def _barred(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        relative = isinstance(node, ast.ImportFrom) and node.level
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
        names = [each.name for each in node.names] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            if relative or module.partition(".")[0] not in PERMITTED_IMPORTS:
                yield f"an import of {'.' if relative else ''}{module}"
            if module == "torch":
                yield from (f"an import of torch.{name}" for name in names if name in _OF_TORCH)
            if module.startswith("torch.") and module.split(".")[1] in _OF_TORCH:
                yield f"an import of {module}"
    elif isinstance(node, ast.Name) and (node.id in _CALLS or _is_dunder(node.id)):
        yield node.id
    elif isinstance(node, ast.Attribute):
        if node.attr in _ATTRIBUTES or (_is_dunder(node.attr) and node.attr != "__init__"):
            yield f".{node.attr}"
        if node.attr in _OF_TORCH and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}"
    elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
        yield "trust_remote_code"
    elif isinstance(node, ast.Call) and _opens(node.func):
        position = 1 if isinstance(node.func, ast.Name) else 0
        modes = [*node.args[position : position + 1], *(each.value for each in node.keywords if each.arg == "mode")]
        if any(not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+") for mode in modes):
            yield "open for writing"


def _opens(function: ast.expr) -> bool:
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return name == "open"


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name != "__name__"


def _check_functions(functions: Mapping[str, Callable[..., Any]], file: str) -> None:
    for name, parameters in (NEEDED | OPTIONAL).items():
        shown = f"{name}({', '.join(parameters)})"
        if name not in functions:
            if name in NEEDED:
                raise TaskError(f"task.module: {file} has no function {shown}; add it")
            continue
        found = [each for each in inspect.signature(functions[name]).parameters if each != "base"]
        if len(found) != len(parameters):
            raise TaskError(
                f"task.module: {file} must define {shown}, but defines {name}({', '.join(found)}); give it these "
                "parameters, and add base if it needs task.model"
            )


def _parsed(text: str, file: str) -> ast.Module:
    try:
        return ast.parse(text, file)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise TaskError(
            f"task.module: {file} is not valid Python ({type(error).__name__} on line {line}); correct it"
        ) from error


def _literals(tree: ast.Module) -> dict[str, Any]:
    """Return the names to which the file assigns a literal at module level."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue  # not a literal, so its value is known only when the file runs
    return found


def _checked_better(value: object, file: str) -> dict[str, Literal["higher", "lower"]]:
    fits = isinstance(value, dict) and all(isinstance(k, str) and v in ("higher", "lower") for k, v in value.items())
    if not fits or "loss" in value:  # type: ignore[operator]
        raise TaskError(
            f'task.module: better in {file} must map each score except the loss to "higher" or "lower"; write it '
            'as a literal, such as {"score": "higher"}'
        )
    return dict(value)  # type: ignore[call-overload,no-any-return]
