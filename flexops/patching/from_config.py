"""The report for a model of which there is only the config: it is made on ``meta``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ..errors import PatchError
from ..report import Report
from .apply import patch
from .classes import is_architecture, require_transformers
from .probe import first_line

_ON_HUB = re.compile(r"\w[\w.-]*/[\w.-]+")


def report(name: str) -> Report:
    """What :func:`flexops.patch` says of a model.

    Args:
        name: a config.json, the folder that it is in, an architecture's name, or a model's on the
            Hugging Face Hub (``owner/name``).

    Raises:
        PatchError: there is no such thing, or transformers cannot make a model of it.
    """
    require_transformers("a model's config is read by transformers, which is not installed")
    import transformers

    given = Path(name)
    path = given / "config.json" if given.is_dir() else given
    try:
        if path.is_file():
            config = transformers.AutoConfig.from_pretrained(path)
        elif is_architecture(name):
            config = transformers.AutoConfig.for_model("gemma3_text" if name == "gemma3" else name)
        else:
            config = (
                _from_hub(transformers, name)
                if _ON_HUB.fullmatch(name) and not given.exists()
                else None
            )
        if config is None:
            found = f"{name}, a folder without a config.json" if given.is_dir() else name
            raise PatchError(
                "there is no such config",
                found=found,
                required=(
                    "a config.json, a folder with one, a model's name on the Hugging Face Hub"
                    " (owner/name), or a model type of transformers"
                ),
                fix="flexops patch llama",
            )
        stored = getattr(config, "quantization_config", None)
        with torch.device("meta"):
            model = _class(transformers, config)(config)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
        raise PatchError(
            "transformers makes no model of this config",
            found=first_line(error),
            required="a config.json with a model_type that this transformers knows",
            fix=(
                f"python -m json.tool {path}   # is it whole? If it is: pip install --upgrade"
                " transformers"
            ),
        ) from error
    return patch(model, weights=_weights(stored, model))


def _weights(stored: Any, model: torch.nn.Module) -> Any:
    """What a checkpoint of 4 bits has instead of 16-bit weights, None for other checkpoints."""
    if stored is None:
        return None
    from ..int4.checkpoints import Int4Config
    from ..int4.formats import MXFP4, Declared, format_of, usable_group_size

    try:
        form = format_of(stored)
    except PatchError:
        return None
    if form is MXFP4:  # of experts only
        names = [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
        return Int4Config(32, symmetric=True, modules_to_not_convert=names)
    sizes = {usable_group_size(size) for size in Declared.by(stored).group_sizes if size}
    return Int4Config(min(sizes - {0}, default=32))


def _from_hub(transformers: Any, name: str) -> Any:
    """The config only, from the Hub or from what it has downloaded before; code that came with a
    model is not run."""
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise PatchError(
            f"the config of {name} could not be had",
            found=first_line(error),
            required=(
                "a model on the Hugging Face Hub whose code is transformers' own, and a network;"
                " or it is in the Hub's cache"
            ),
            fix=(
                "flexops patch FOLDER   # with the model's config.json in it; a gated model: hf"
                " auth login; HF_HUB_OFFLINE=1 rules a download out"
            ),
        ) from error


def _class(transformers: Any, config: Any) -> Any:
    """The class that the config names, else the one for masked or causal language models, else the
    bare model."""
    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0] or " ", None)
    if named is not None:
        return named
    # BERT is in both lists
    masked = () if getattr(config, "is_decoder", False) else (transformers.AutoModelForMaskedLM,)
    kinds = (*masked, transformers.AutoModelForCausalLM, transformers.AutoModel)
    return next(
        kind._model_mapping[type(config)] for kind in kinds if type(config) in kind._model_mapping
    )
