"""peft builds adapters for whole layers while a model is read, and is not imported for it."""

import importlib
import sys

import pytest

from lightning_automodel._compat.peft import whole_layers

NAME, FLAG = "peft.tuners.tuners_utils", "_torch_supports_distributed"


@pytest.mark.parametrize("where", ["before", "within", "nowhere"])
def test_wherever_peft_is_imported(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(NAME)
    monkeypatch.setattr("peft.tuners.tuners_utils", module)  # an import within sets another
    finders = list(sys.meta_path)
    if where != "before":
        monkeypatch.delitem(sys.modules, NAME)
    with whole_layers():
        assert (NAME in sys.modules) == (where == "before")
        if where != "nowhere":
            assert not getattr(importlib.import_module(NAME), FLAG)
    if where != "nowhere":
        assert getattr(sys.modules[NAME], FLAG)
    assert sys.meta_path == finders
