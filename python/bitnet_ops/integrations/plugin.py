"""What the plug-ins of SGLang and vLLM share: status and diagnosis, and the quantisation config.

Both engines find a plug-in by an entry point, call it in every process, log and swallow its
exception, and then report "Unknown quantization method". It must not import an engine.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bitnet_ops.config.hybrid import refuse_states
from bitnet_ops.errors import BitNetError
from bitnet_ops.integrations.checkpoint import (
    ACTIVATION_DTYPES,
    FUSED,
    CheckpointError,
    Settings,
)
from bitnet_ops.integrations.linear_method import BitNetLinearMethod

METHOD = "bitnet"

logger = logging.getLogger(__name__)


class RegistrationError(BitNetError, RuntimeError):
    """The engine's tables are of a kind that the plug-in does not know."""


@dataclass(frozen=True)
class Plugin:
    """One engine's plug-in.

    Args:
        engine: the name of the engine's package and of ours.
        distributions: under which names pip may have installed it.
        group: of entry points.
        variable: of the environment, with the user's list of plug-ins to load.
        allows: whether such a list, or None, allows ours.
        tested: versions of the engine.
    """

    engine: str
    distributions: tuple[str, ...]
    group: str
    variable: str
    allows: Callable[[str | None], bool]
    tested: tuple[str, ...]

    def version(self) -> str:
        """The installed distribution's version, or "unknown"."""
        for name in self.distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return "unknown"

    def has_entry_point(self) -> bool:
        """Whether the engine will find the plug-in: a source tree on PYTHONPATH has none."""
        ours = f"bitnet_ops.integrations.{self.engine}:register"
        points = importlib.metadata.entry_points(group=self.group)
        return any(point.value == ours for point in points)

    def unsupported(self, expected: str, found: object) -> RegistrationError:
        """The error for an engine with another surface."""
        return RegistrationError(
            f"bitnet: expected {expected}, got {found} in {self.engine} {self.version()}; tested "
            f"with {self.engine} {', '.join(self.tested)}: install that version, or report this one"
        )

    @contextlib.contextmanager
    def registering(self) -> Iterator[None]:
        """Log what comes of a registration, for the engine swallows an exception."""
        try:
            yield
        except Exception:
            logger.exception(
                "bitnet_ops could not register with %s %s: a BitNet checkpoint will fail with "
                "'Unknown quantization method'; run bitnet_ops.integrations.%s.doctor()",
                self.engine,
                self.version(),
                self.engine,
            )
            raise
        logger.info("bitnet_ops registered the quantisation method %r", METHOD)

    def status(self) -> dict[str, Any]:
        """What can be known of the plug-in without importing the engine, which takes seconds.

        Keys: installed (bool), version (of the engine, or None), entry_point (registered for this
        Python), active (the engine is installed, finds the plug-in and may load it), the variable's
        name (its value, or None), tested (versions), version_tested (bool).
        """
        version, listed = self.version(), os.environ.get(self.variable)
        installed, entry_point = version != "unknown", self.has_entry_point()
        return {
            "installed": installed,
            "version": version if installed else None,
            "entry_point": entry_point,
            "active": installed and entry_point and self.allows(listed),
            self.variable: listed,
            "tested": list(self.tested),
            "version_tested": version in self.tested,
        }

    def doctor(
        self, register: Callable[[], None], found: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """What a user with a failing set-up should look at; never raises.

        `register` is called, then `found`, whose keys join those of `status`; among them
        `registered` ({table of the engine: bool}). Key `problems`: one sentence each; empty when
        all is well.
        """
        report: dict[str, Any] = {**self.status(), "registered": {}}
        problems: list[str] = []
        try:
            register()
            report.update(found())
            absent = [table for table, there in report["registered"].items() if not there]
            problems += [f"{table} lacks {METHOD!r}" for table in absent]
        except Exception as error:  # a diagnosis must survive whatever it diagnoses
            problems.append(f"registration failed: {type(error).__name__}: {error}")
        if not report["entry_point"]:
            problems.append(
                f"no entry point of group {self.group}: the processes of {self.engine} will not "
                f"know {METHOD!r}; install bitnet-ops with pip (a source tree on PYTHONPATH has "
                "none)"
            )
        elif report["installed"] and not report["active"]:
            listed = report[self.variable]
            problems.append(f"{self.variable}={listed} leaves {METHOD!r} out: add it")
        return {**report, "problems": problems}


class EngineConfig:
    """config.json's quantization_config as engines ask for it; an engine's base class comes after.

    A sub-class names the engine's classes: `linear_base`, of which every linear is; `linears`, the
    kinds that are served; `unquantized`, the method of a skipped linear; `method`, our own.

    Args:
        checkpoint: quantization_config of config.json; None or empty means transformers' defaults
            (linear class "bitlinear", packed).
    """

    linear_base: type
    linears: tuple[type, ...]
    unquantized: type
    method: type[BitNetLinearMethod]
    packed_modules_mapping: Mapping[str, list[str]]

    def __init__(self, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.settings = Settings(checkpoint)

    def __repr__(self) -> str:
        return f"BitNetConfig({self.settings.rule.value}, not converted: {self.settings.listed})"

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """No float16: squared ReLU overflows it, from the first layer on."""
        return list(ACTIVATION_DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return -1  # no GPU

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has it all

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """From quantization_config, with what an engine adds to it.

        Raises CheckpointError where `scale_rule` does, and where an untied output head would be
        ternary (a list of modules_to_not_convert that lacks lm_head): the engines' heads are not;
        UnsupportedModelError for a hybrid, as far as the engine shows the model's config.
        """
        model: Any = config.get("hf_config")
        if hasattr(model, "to_dict"):
            refuse_states(METHOD, model.to_dict())
        result = cls(config)
        result.packed_modules_mapping = config.get("packed_modules_mapping") or {}
        result.settings.check_head(config.get("hf_config"))
        return result

    def is_skipped(self, prefix: str) -> bool:
        """Whether the layer of that name is left unquantised; see `Settings.is_skipped`."""
        # Not every model class fills the mapping.
        return self.settings.is_skipped(prefix, {**FUSED, **(self.packed_modules_mapping or {})})

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Our method for a ternary linear, the unquantised one for a skipped linear, else None.

        A linear must never get None (SGLang asserts); embeddings, heads and attention do.
        """
        if not isinstance(layer, self.linear_base):
            return None
        if self.is_skipped(prefix):
            return self.unquantized()
        if not isinstance(layer, self.linears):
            raise CheckpointError(
                "bitnet: expected a replicated, column- or row-parallel linear, got "
                f"{type(layer).__name__} at {prefix}: not supported"
            )
        return self.method(self.settings.rule, prefix)
