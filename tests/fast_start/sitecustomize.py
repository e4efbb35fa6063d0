"""Imports libraries faster in the Python processes that tests start, because imports are most of what such a process does.

A worker that imports Transformers takes 9 CPU seconds; a third of that is the same in every process:

- Transformers parses all its source files for the names that they export, twice, and reads the metadata of all installed
  packages. Here the first process of a test session does so, and the others read its results.
- The garbage collector searches the imported modules, which are never garbage. Here it runs less often.

`tests/conftest.py` puts this folder on `PYTHONPATH`. A process without `RLCORE_TEST_IMPORTS` is not changed.
"""

import gc
import os
import sys
from importlib.machinery import PathFinder

MODULE = "transformers.utils.import_utils"


def remembered(what, key, compute):
    """The result of `compute` in the first process of the session that asks for it."""
    import hashlib
    import pickle

    name = hashlib.sha256(repr((key, sys.prefix, sys.version)).encode()).hexdigest()
    file = os.path.join(os.environ["RLCORE_TEST_IMPORTS"], f"{what}-{name}")
    try:
        with open(file, "rb") as stream:
            return pickle.load(stream)
    except OSError:
        found = compute()
    try:
        with open(f"{file}-{os.getpid()}", "wb") as stream:
            pickle.dump(found, stream)
        os.replace(stream.name, file)
    except OSError:
        pass  # the session has ended and removed the folder
    return found


class Finder:
    """Finds the module of Transformers with the slow functions."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Python's own answer, with another `exec_module`."""
        if name != MODULE:
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: cls.load(module, execute)
        return spec

    @staticmethod
    def load(module, execute):
        """Execute the module with the remembered metadata; then it looks up its source files in the remembered names."""
        from importlib import metadata

        read = metadata.packages_distributions
        metadata.packages_distributions = lambda: remembered("packages", sys.path, read)
        try:
            execute(module)
        finally:
            metadata.packages_distributions = read
        parse = module.create_import_structure_from_path
        models = os.path.join(os.path.dirname(os.path.dirname(module.__file__)), "models")
        found = {}

        def structure(module_path):
            folder = str(module_path).removesuffix(os.sep + "__init__.py")
            if folder != models:
                return parse(module_path)
            if not found:
                found[models] = remembered("structure", models, lambda: parse(models))
            return found[models]

        module.create_import_structure_from_path = structure


if "RLCORE_TEST_IMPORTS" in os.environ:
    gc.set_threshold(50_000, 20, 20)
    sys.meta_path.insert(0, Finder)
