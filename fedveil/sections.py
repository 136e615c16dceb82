"""What every section of the run config is, and the one that says where figures go."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def kebab(name: str) -> str:
    """A field's name as a key of the run config."""
    return name.replace("_", "-")


class Section(BaseModel):
    """A section of the run config: unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=kebab, populate_by_name=True, allow_inf_nan=False
    )


class SinksConfig(Section):
    """Where else the server writes a round's figures while the run goes on. None of them can stop a round."""

    use: str = Field(
        "", max_length=200, description="tensorboard, mlflow, prometheus: those of them that are named, with commas"
    )
    mlflow_uri: str = Field(
        "", max_length=500, description="http on loopback, or https; empty = mlflow.db in run.dir. Sites see this key"
    )
    prometheus_port: int = Field(
        9464, ge=1024, le=65535, description="on 127.0.0.1; a scrape needs the token in run.dir/prometheus.token"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The sinks, in the order in which they are named."""
        return tuple(name.strip() for name in self.use.split(",") if name.strip())

    @field_validator("use")
    @classmethod
    def _each_once(cls, text: str) -> str:
        names = [name.strip() for name in text.split(",")]
        if text and (len(set(names)) < len(names) or not all(name.isidentifier() for name in names)):
            raise ValueError("expected names with commas between them, each once")
        return text

    @field_validator("mlflow_uri")
    @classmethod
    def _without_secrets(cls, text: str) -> str:
        try:
            parts = urlsplit(text)
            plain = text.isascii() and text.isprintable() and not set(' "\\') & set(text) and parts.port != 0
        except ValueError as error:
            raise ValueError(f"expected an address ({error})") from None
        if text and (not plain or not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc):
            raise ValueError("expected an address without user, password, query and fragment, for sites see it")
        if text and parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            raise ValueError(f"expected https, or http on one of {', '.join(_LOOPBACK)}")
        return text


def near(known: Mapping[str, Sequence[str]], section: str, name: str) -> str:
    """The key of `known`, by section, that was probably meant; "" for none.

    One of the section that is spelled alike or has `name` for its initials; else one of another section that is `name`.
    """
    if section not in known:
        return next(iter(difflib.get_close_matches(section, known, 1)), "")
    short = [key for key in known[section] if "".join(word[0] for word in key.split("-")) == name]
    alike = [*short, *difflib.get_close_matches(name, known[section], 1)]
    others = [f"{other}.{name}" for other, keys in known.items() if name in keys]
    return next(iter([*(f"{section}.{key}" for key in alike), *others]), "")
