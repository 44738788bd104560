"""What other machines have: a CUDA build without a GPU, an accelerator. Simulated, since none is here."""

import importlib

import pytest
import torch
from conftest import SCRIPTS


class Chosen(Exception):
    """Ends main() where it asks for its device."""


@pytest.fixture
def machine(monkeypatch):
    """machine("cuda", available=False): torch was built for this accelerator and (does not) find one."""

    def pretend(kind, available):
        monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)

    return pretend


scripts = pytest.mark.parametrize("name", SCRIPTS)


@scripts
@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_auto_is_an_accelerator_that_is_there_now(name, kind, machine):
    pick_device = importlib.import_module(name).pick_device
    machine(kind, available=False)
    assert pick_device("auto", built_in=False).type == "cpu"
    machine(kind, available=True)
    assert pick_device("auto", built_in=False).type == kind
    assert pick_device("auto", built_in=True).type == "cpu"
    assert pick_device("meta", built_in=True).type == "meta", "what was asked for"


OWN = dict.fromkeys(SCRIPTS, dict(model_name="folder"))
OWN |= dict(sac_hybrid=dict(env_id="Own-v0"), wsrl_warmup=dict(env_id="Own-v0"))


@scripts
@pytest.mark.parametrize("own", [False, True], ids=["built in", "own"])
def test_main_asks_for_the_device_of_what_it_runs(name, own, monkeypatch, tmp_path):
    script = importlib.import_module(name)

    def pick_device(device, built_in):
        raise Chosen(device, built_in)

    monkeypatch.setattr(script, "pick_device", pick_device)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Chosen) as chosen:
        script.main(script.Args(**(OWN[name] if own else {})))
    assert chosen.value.args == ("auto", not own)
