"""recollect: distil a dataset into a tiny addressable memory, and recall from it what you need later.

The public names. Each is imported when it is first used, so that `import recollect` and `recollect --help` do not wait
for torch. No module is called like one of them.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recollect.budget import Budget
    from recollect.classifier import Classifier
    from recollect.composition import ask, compose
    from recollect.config import DistillConfig, Recipe, preset
    from recollect.data import Images, Split, from_dataset, load
    from recollect.data.preprocess import Preprocess
    from recollect.distillation import distill
    from recollect.errors import RecollectError
    from recollect.evaluation import Evaluation, evaluate
    from recollect.memory import Memory
    from recollect.nets import Network
    from recollect.publish import push_to_hub
    from recollect.selection import select
    from recollect.unroll import metagradient

__version__ = version("recollect")

_HOME = {
    "Budget": "budget",
    "Classifier": "classifier",
    "DistillConfig": "config",
    "Evaluation": "evaluation",
    "Images": "data",
    "Memory": "memory",
    "Network": "nets",
    "Preprocess": "data.preprocess",
    "Recipe": "config",
    "RecollectError": "errors",
    "Split": "data",
    "ask": "composition",
    "compose": "composition",
    "distill": "distillation",
    "evaluate": "evaluation",
    "from_dataset": "data",
    "load": "data",
    "metagradient": "unroll",
    "preset": "config",
    "push_to_hub": "publish",
    "select": "selection",
}

__all__ = [
    "Budget",
    "Classifier",
    "DistillConfig",
    "Evaluation",
    "Images",
    "Memory",
    "Network",
    "Preprocess",
    "Recipe",
    "RecollectError",
    "Split",
    "ask",
    "compose",
    "distill",
    "evaluate",
    "from_dataset",
    "load",
    "metagradient",
    "preset",
    "push_to_hub",
    "select",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'recollect' has no attribute '{name}'")
    return getattr(import_module(f"recollect.{_HOME[name]}"), name)
