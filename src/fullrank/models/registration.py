"""Make transformers' Auto classes know our model, whichever of the two packages is imported first.

`AutoConfig.register` needs our classes, and those need transformers, whose import takes seconds that
`import fullrank` must not cost. So `register_when_imported` looks at transformers' two modules of Auto
classes: for one that is there already, ours is imported at once; for one that is not, a finder stands in
`sys.meta_path`, which lets Python's own finders load the module and imports ours then. Nothing of
transformers is replaced, and ours call the public `register`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

HOMES = {
    "transformers.models.auto.configuration_auto": "fullrank.models.configuration",
    "transformers.models.auto.modeling_auto": "fullrank.models.causal_lm",
}
"""A module of Auto classes, and ours that registers itself with them as its last act."""


class _Loader(importlib.abc.Loader):
    """Python's own loader, and our module after it."""

    def __init__(self, inner: importlib.abc.Loader, home: str) -> None:
        self.inner, self.home = inner, home

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is what it would be without us.
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        module.__loader__ = self.inner
        self.inner.exec_module(module)
        # Where ours is being imported already, and asked for this one, it is left to go on.
        importlib.import_module(self.home)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        home = HOMES.get(name)
        if home is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, home)
        return spec


def register_when_imported() -> None:
    """Register what is there, and see to the rest when it comes; calling it again changes nothing."""
    for name, home in HOMES.items():
        if name in sys.modules:
            importlib.import_module(home)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
