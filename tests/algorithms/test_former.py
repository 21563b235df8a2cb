"""Pickles of earlier versions, refused by name."""

import importlib
import importlib.util
import pickle

import pytest

import rotor
from rotor.errors import FORMER_MODULES


def test_pickles_of_earlier_versions_are_refused_by_name():
    held = b"\x80\x04\x8c\x0drotor.chained\x8c\x13ChainCheckpointable\x93."
    with pytest.raises(ModuleNotFoundError, match=r"save model\.state_dict\(\) there"):
        pickle.loads(held)


def test_no_present_module_is_a_former_one():
    for name in FORMER_MODULES:
        with pytest.raises(ModuleNotFoundError, match="earlier version"):
            importlib.import_module(name)


def test_other_modules_are_found_as_ever():
    assert importlib.util.find_spec("rotor.nothing") is None
    assert importlib.util.find_spec("rotor.chain") is not None
    assert rotor.Chain.__module__ == "rotor.chain"
