"""The report for a model of which there is only the config: it is made on ``meta``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from ..errors import PatchError
from .apply import patch
from .classes import architectures
from .report import Report


def report(name: str) -> Report:
    """What :func:`flexops.patch` says of a model.

    Args:
        name: a config.json, the folder that it is in, or an architecture's name.

    Raises:
        PatchError: there is no such thing, or transformers cannot make a model of it.
    """
    if importlib.util.find_spec("transformers") is None:
        raise PatchError("a model's config is read by transformers, which is not installed", fix="pip install transformers")
    import transformers

    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        if path.is_file():
            config = transformers.AutoConfig.from_pretrained(path)
        elif name in architectures():
            config = transformers.AutoConfig.for_model("gemma3_text" if name == "gemma3" else name)
        else:
            raise PatchError("there is no such config", found=name, required=f"a config.json, a folder with one, or one of {', '.join(architectures())}")
        with torch.device("meta"):
            model = _class(transformers, config)(config)
    except (ValueError, KeyError, AttributeError, OSError, ImportError) as error:
        raise PatchError("transformers makes no model of this config", found=f"{type(error).__name__}: {error}") from error
    return patch(model)


def _class(transformers: Any, config: Any) -> Any:
    """The class that the config names, else the one for language models, else the bare model."""
    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0] or " ", None)
    if named is not None:
        return named
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModel)
    return next(kind._model_mapping[type(config)] for kind in kinds if type(config) in kind._model_mapping)
