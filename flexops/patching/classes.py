"""Patching before there is a model: constructors of transformers' classes that patch what they have
made."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import PatchError
from ..report import Report, Row, rows_of

_originals: dict[type, Callable[..., Any]] = {}
"""The constructors of the classes that are patched."""


def patch(target: str | type, apply: Callable[[Any], Report]) -> Report:
    """Have ``apply`` called for each model of a class, or of the classes of an architecture, when
    its constructor is done."""
    classes = list(_classes(target))
    for cls in classes:
        if cls in _originals:
            cls.__init__ = _originals[cls]  # type: ignore[misc]
        _originals[cls] = cls.__init__  # type: ignore[misc]
        cls.__init__ = _constructor(cls.__init__, apply)  # type: ignore[misc]
    rows = [Row(cls.__name__, 1, "patched when constructed", True) for cls in classes]
    return Report(target if isinstance(target, str) else target.__name__, rows_of(rows))


def unpatch(target: str | type) -> int:
    restored = [cls for cls in _classes(target) if cls in _originals]
    for cls in restored:
        cls.__init__ = _originals.pop(cls)  # type: ignore[misc]
    return len(restored)


def _constructor(
    original: Callable[..., Any], apply: Callable[[Any], Report]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        apply(self)

    return construct


def require_transformers(why: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise PatchError(why, fix="pip install transformers")


def is_architecture(name: str) -> bool:
    """Whether transformers has models of this type."""
    return bool(name) and _module(name) is not None


def _module(name: str) -> str | None:
    """transformers' module with the models of a type, such as ``mixtral`` or ``gemma3_text``."""
    require_transformers(
        "an architecture's name is one of transformers' models, which is not installed"
    )
    from transformers.models.auto import configuration_auto as auto

    folder = auto.model_type_to_module_name(name)
    qualified = f"transformers.models.{folder}.modeling_{folder}"
    known = name in auto.CONFIG_MAPPING or name == folder
    try:
        if known and importlib.util.find_spec(qualified):
            return qualified
    except ImportError:
        pass
    return next((cls.__module__ for cls in _listed(name)), None)


def _listed(name: str) -> Iterator[type]:
    """The classes in transformers' lists for a type: of a folder of several types, or another
    type's."""
    import transformers
    from transformers.models.auto import modeling_auto as models

    for mapping in (
        models.MODEL_MAPPING_NAMES,
        models.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        models.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        found = mapping.get(name, ())
        for one in (found,) if isinstance(found, str) else found:
            yield getattr(transformers, one)


def _classes(target: str | type) -> Iterator[type]:
    if isinstance(target, type):
        yield target
        return
    qualified = _module(target)
    if qualified is None:
        raise PatchError(
            "flexops.patch knows no architecture of this name",
            found=repr(target),
            required="one of transformers' model types, such as llama or mixtral",
            fix="flexops.patch(model), once the model is loaded",
        )
    from transformers import PreTrainedModel

    module = importlib.import_module(qualified)
    own = (x for x in vars(module).values() if isinstance(x, type) and x.__module__ == qualified)
    for cls in dict.fromkeys((*own, *_listed(target))):
        if issubclass(cls, PreTrainedModel) and "__init__" in cls.__dict__:
            yield cls
