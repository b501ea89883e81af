"""Names of tensors as checkpoints have them, and as Transformers calls them since."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key


def renaming_of(model: PreTrainedModel) -> Callable[[str], str]:
    """What Transformers makes of the names in a checkpoint while it loads it into this model.

    Not of those whose tensors it converts, too, as it does with experts; they stay as they are.
    """
    known = dict(model.state_dict())
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]

    def renamed(name: str) -> str:
        found, _ = rename_source_key(name, renamings, [], model.base_model_prefix, known)
        return str(found)

    def rename(name: str) -> str:
        module, _, part = name.rpartition(".")
        weight = renamed(f"{module}.weight")  # whatever else of its layer is stored goes with it
        return weight.removesuffix("weight") + part if weight in known else renamed(name)

    return rename
