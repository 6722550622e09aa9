"""`audit` finds planted faults, names their cause and place, and finds nothing in their healthy twins."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers", reason="the extra [models] is not installed")

from audits.faults import FAULTS, IDS, IN_DOCUMENTS, PACKED
from audits.faulty_models import make_llama, register_backend
from clearhead.models.audits.audit import audit

UNFOUND = {"no scale"}  # the formula of a hand-written model is not recorded, and every input reaches what it may
# without the kernels of mamba-ssm, transformers computes other outputs with a cache, in float64 too
ALSO_FOUND = {"state of Bamba crosses documents": {"same"}}


def run_audit(fault, faulty, level="all"):
    torch.manual_seed(0)
    model, batch = fault.make(faulty)
    mask = fault.mask(faulty) if getattr(fault.mask, "__name__", "") == "<lambda>" else fault.mask
    with fault.changed() if faulty else nullcontext():
        return audit(model, batch, mask, padding=fault.padding, level=level)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_and_its_healthy_twin_is_ok(fault):
    healthy = run_audit(fault, False)
    assert {finding.test for finding in healthy.findings} <= ALSO_FOUND.get(fault.name, set()), healthy
    report = run_audit(fault, True)
    assert report.ok == (fault.name in UNFOUND), report
    if fault.code is not None:
        assert fault.code in [finding.code for finding in report.findings], report


def test_the_table_holds_what_was_planted():
    assert len(FAULTS) == 49 and len({fault.name for fault in FAULTS}) == 49
    assert len(FAULTS) - len(UNFOUND) >= 48


@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("head", range(4))
def test_the_layer_and_head_are_named(layer, head):
    model = make_llama(register_backend((layer, head)), num_hidden_layers=6)
    report = audit(model, PACKED | {"input_ids": IDS}, IN_DOCUMENTS)
    by_test = {finding.test: finding for finding in report.findings}
    assert (by_test["layer"].module, by_test["layer"].heads) == (f"layers.{layer}", (head,))
    assert (by_test["computed"].module, by_test["computed"].heads) == (f"layers.{layer}.self_attn", (head,))
    assert by_test["computed"].code == "packed-mask-ignored"
