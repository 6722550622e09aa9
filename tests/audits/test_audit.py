"""`audit` on all that it takes, callables, compiled models, train mode, recordings, vectors; and its report."""

import json
import weakref

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

pytest.importorskip("transformers", reason="the extra [models] is not installed")

import transformers
from ranks.processes import on_ranks

from audits.faults import CAUSAL, IDS, IN_DOCUMENTS, OWN, PACKED, PLAIN, RIGHT, expect_of_bart, make_lfm2
from audits.faulty_models import (
    GROUPED,
    SMALL,
    EncoderAndDecoder,
    HandWrittenGPT,
    make_llama,
    make_model,
    register_backend,
)
from clearhead.models.audits.audit import assert_attends, audit
from clearhead.models.audits.audited_model import AuditedModel
from clearhead.models.audits.calls import CallTests


def results(report):
    return {test.name: test.holds for test in report.tests}


def test_a_callable_has_the_influence_test_alone():
    healthy, faulty = make_llama(), make_llama(register_backend("causal alone"))
    for model, holds in ((healthy, True), (faulty, False)):
        report = audit(lambda model=model, **batch: model(**batch), PACKED, IN_DOCUMENTS)
        assert results(report) == {"given": None, "influence": holds}


def test_a_compiled_model():
    model = make_llama()
    compiled = torch.compile(model, backend="eager")
    report = audit(compiled, PLAIN, CAUSAL, level="outputs")
    assert report.ok and results(report)["influence"] is True
    whole = torch.compile(HandWrittenGPT().eval(), backend="eager", fullgraph=True)
    report = audit(whole, {"input_ids": IDS}, CAUSAL, level="all")
    assert results(report)["gradient"] and "not changed" not in str(report), report
    bidirectional = torch.compile(HandWrittenGPT(bidirectional=True).eval(), backend="eager")
    assert not audit(bidirectional, {"input_ids": IDS}, CAUSAL, level="outputs").ok


def test_train_mode_with_dropout_is_named_and_no_finding():
    model = make_llama(attention_dropout=0.1).train()
    report = audit(model, PLAIN, CAUSAL, level="all")
    (influence,) = (test for test in report.tests if test.name == "influence")
    assert "train mode" in influence.text and report.ok, report
    assert "dropout is on: call model.eval()" in str(report)
    assert results(report)["computed"] is results(report)["same"] is None
    assert None not in results(audit(model.eval(), PLAIN, CAUSAL, level="all")).values()


def test_an_image_model_in_train_mode_is_audited_by_its_calls_and_blocks():
    model = make_model("ViT", image_size=16, patch_size=4, attention_probs_dropout_prob=0.1).train()
    report = audit(model, {"pixel_values": torch.rand(1, 3, 16, 16)}, None)
    assert report.ok and results(report) == {"given": True, "computed": None, "influence": None, "layer": True}


def test_calls_with_dropout_in_a_recording_are_not_compared_with_the_formula():
    model = make_llama(attention_dropout=0.5).train()
    with torch.no_grad(), ch.watch(model, values=True) as recording:
        model(**PLAIN)
    report = audit(recording, CAUSAL)
    assert report.ok and results(report) == {"given": True, "computed": None}


def test_a_compiled_model_has_the_layers_of_the_model_that_was_compiled():
    windowed = torch.compile(make_model("Mistral", sliding_window=3, **SMALL, **GROUPED), backend="eager")
    lost = torch.compile(make_model("Mistral", sliding_window=None, **SMALL, **GROUPED), backend="eager")
    window = CAUSAL & ch.SlidingWindow(before=2)
    assert audit(windowed, PLAIN, window).ok
    assert "window-exceeded" in {finding.code for finding in audit(lost, PLAIN, window).findings}


@pytest.mark.parametrize("level", ["outputs", "layers"])
def test_outputs_with_nan_are_a_finding(level):
    model = make_llama()
    model.layers[0].self_attn.v_proj.weight.data[0, 0] = torch.nan
    assert "outputs-nan" in {finding.code for finding in audit(model, PLAIN, CAUSAL, level=level).findings}


def test_a_bool_mask_that_is_added_to_the_scores_has_its_cause_and_remedy():
    model, allowed = make_llama(), IN_DOCUMENTS.dense(13, 13).expand(2, 1, -1, -1)
    model.set_attn_implementation("eager")
    found = audit(model, {**PLAIN, "attention_mask": allowed, "position_ids": PACKED["position_ids"]}, IN_DOCUMENTS)
    assert found.findings[0].code == "mask-added" and "pass floats, 0 and −inf" in found.findings[0].text
    numbers = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    batch = {**PLAIN, "attention_mask": numbers, "position_ids": PACKED["position_ids"]}
    assert audit(model, batch, IN_DOCUMENTS).ok


def test_a_padding_mask_that_a_module_does_not_pass_on_is_no_part_of_what_was_given():
    class Encoder(torch.nn.Module):
        def __init__(self, passes):
            super().__init__()
            self.embedding, self.passes = torch.nn.Embedding(200, 8), passes
            self.layers = torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2, batch_first=True)])

        def forward(self, input_ids, attention_mask):
            x, hidden = self.embedding(input_ids), attention_mask == 0
            return x + self.layers[0](x, x, x, key_padding_mask=hidden if self.passes else None)[0]

    batch = {"input_ids": IDS, "attention_mask": RIGHT}
    assert audit(Encoder(True).eval(), batch).ok
    assert audit(Encoder(False).eval(), batch).findings[0].code == "padding-mask-lost"


class Block(torch.nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal

    def attend(self, x):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        output = F.scaled_dot_product_attention(heads, heads, heads, is_causal=self.causal)
        return output.transpose(1, 2).flatten(2)

    def forward(self, x):
        return x + self.attend(x)


def make_vectors():
    return torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))


def test_vectors_and_tuples():
    x = make_vectors()
    assert audit(Block(True), x, CAUSAL).ok
    assert audit(Block(True), (x,), CAUSAL, level="all").ok
    report = audit(lambda x: x + x.mean(1, keepdim=True), x, CAUSAL)
    assert results(report) == {"given": None, "influence": False}
    assert [finding.code for finding in report.findings] == ["later-positions-reach-outputs"]
    assert [f.code for f in audit(Block(False), x, CAUSAL).findings][:2] == ["not-causal", "mask-ignored"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_transformer_of_torch_whose_fast_path_packs_the_tokens():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()  # gives its layers nested tensors
    padding = torch.arange(9) >= torch.tensor([[7], [9]])
    report = audit(model, {"src": make_vectors(), "src_key_padding_mask": padding}, None, padding=~padding)
    assert report.ok and results(report)["layer"] is None, report


def test_outputs_that_are_initialised_to_zero_are_a_warning_and_no_finding():
    class ZeroBlock(Block):
        def __init__(self):
            super().__init__(causal=True)
            self.scale = torch.nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return x + self.scale * self.attend(x)

    report = audit(torch.nn.Sequential(ZeroBlock(), ZeroBlock()), make_vectors(), CAUSAL, level="all")
    assert report.ok, report
    warned = {test.name for test in report.tests if "warning: " in test.text and "outputs stay" in test.text}
    assert "influence" in warned, report


def test_one_layer_of_unknown_number_need_not_reach_far():
    class Neighbours(torch.nn.Module):
        def forward(self, x):
            heads = x[:, None]
            band = torch.ones(9, 9, dtype=torch.bool).tril(1).triu(-1)
            return x + (heads @ heads.mT).masked_fill(~band, -torch.inf).softmax(-1)[:, 0] @ x

    report = audit(Neighbours(), make_vectors(), ch.SlidingWindow(before=1, after=1))
    assert report.ok and "warning" not in str(report), report


def test_a_mask_by_head_of_calls_that_are_not_recorded():
    causal = torch.ones(1, 2, 9, 9, dtype=torch.bool).tril()
    assert audit(lambda x: Block(True)(x), make_vectors(), causal).ok
    assert not audit(lambda x: Block(False)(x), make_vectors(), causal).ok


def test_a_key_that_a_mask_hides_from_every_query_is_no_padding():
    class Hides(Block):
        def attend(self, x):
            mask = torch.ones(9, 9, dtype=torch.bool).tril() & (torch.arange(9) != 8)
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0]

    assert results(audit(Hides(True), make_vectors(), CAUSAL))["given"] is False


def test_a_model_may_write_to_its_inputs_and_buffers():
    class Writes(Block):
        def __init__(self):
            super().__init__(causal=True)
            self.norm = torch.nn.BatchNorm1d(8, momentum=0.5)
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x):
            self.passes += 1
            self.norm(x.detach().transpose(1, 2))
            x *= 1 + 0.1 * self.passes
            return super().forward(x)

    model, x = Writes().train(), make_vectors()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    report = audit(model, x, CAUSAL, level="all")
    assert report.ok and results(report)["gradient"], report
    assert torch.equal(x, make_vectors())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_outputs_that_are_not_finite():
    def overflow(x):
        return Block(True)(x) + torch.tensor([0.0, torch.inf])[(x.mean(1, keepdim=True) > 0).long()]

    report = audit(overflow, make_vectors(), CAUSAL)
    assert results(report)["influence"] is False, report


def test_what_cannot_be_run_otherwise_is_not_examined():
    class OneShape(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_llama()

        def forward(self, input_ids):
            if input_ids.shape != IDS.shape:
                raise RuntimeError
            return self.inner(input_ids)

    (same,) = (test for test in audit(OneShape(), OWN, CAUSAL, level="all").tests if test.name == "same")
    assert same.holds is None and "not alone: RuntimeError" in same.text


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("use model.train()")


def test_a_backward_pass_that_raises_is_not_examined():
    class NoBackward(Block):
        def forward(self, x):
            return FailsBackward.apply(super().forward(x))

    report = audit(NoBackward(causal=True), make_vectors(), CAUSAL, level="all")
    assert report.ok and results(report)["gradient"] is None, report


def test_rounding_is_named_and_no_finding():
    class Rounds(Block):
        def forward(self, x):
            noise = 1e-5 * torch.tanh(x.detach().sum())  # without a gradient
            return super().forward(x) + noise

    report = audit(Rounds(causal=True), make_vectors(), CAUSAL, level="all")
    (influence,) = (test for test in report.tests if test.name == "influence")
    assert influence.holds and "rounding" in influence.text, report


@pytest.mark.parametrize(("shift", "same"), [(0.0, True), (0.01, False)])
def test_rounding_that_a_model_amplifies_is_no_finding(shift, same):
    class Amplifies(torch.nn.Module):
        """Another rounding for one sequence than for several, and a function that makes it large."""

        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(200, 8)

        def forward(self, input_ids):
            hidden = self.embedding(input_ids)
            if len(input_ids) == 1:
                hidden = torch.nextafter(hidden, hidden + 1) + shift
            return torch.sin(1e5 * hidden) if not shift else hidden

    report = audit(Amplifies(), {"input_ids": IDS}, CAUSAL, level="all")
    assert results(report)["same"] is same, report


def make_whisper():
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 10 if weight.ndim > 1 else 1  # so that each input matters
    return model


def test_a_piece_of_a_batch_is_run_with_the_features_of_its_own_sequence():
    features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    batch = {"input_features": features, "decoder_input_ids": IDS % 40 + 5}
    report = audit(make_whisper(), batch, expect_of_bart, level="all")
    (same,) = (test for test in report.tests if test.name == "same")
    assert same.holds and "(alone" in same.text, report


def test_keys_of_two_kinds_in_one_softmax_are_not_examined():
    class Merged(torch.nn.Module):
        """The decoder attends to the encoder's outputs and to its own positions at once."""

        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(200, 8)
            self.decoder = torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2, batch_first=True)])

        def forward(self, input_ids, decoder_input_ids):
            encoded, own = self.embedding(input_ids), self.embedding(decoder_input_ids)
            keys = torch.cat([own, encoded], 1)
            return own + self.decoder[0](own, keys, keys)[0]

    batch = {"input_ids": IDS, "decoder_input_ids": IDS.flip(1).contiguous()}
    report = audit(Merged(), batch, None)
    assert [test.holds for test in report.tests if test.name == "influence"] == [None, True], report


def test_an_encoder_of_any_name_is_an_encoder():
    class TextEncoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            bart = EncoderAndDecoder(True).bart
            self.text_encoder, self.text_decoder, self.config = bart.encoder, bart.decoder, bart.config

        def forward(self, input_ids, decoder_input_ids):
            encoded = self.text_encoder(input_ids=input_ids)[0]
            return self.text_decoder(decoder_input_ids, encoder_hidden_states=encoded, use_cache=False)

    def expect(call):
        return CAUSAL if call.layer.stack == "text_decoder" and call.kind == "self" else None

    batch = {"input_ids": IDS, "decoder_input_ids": IDS.flip(1).contiguous()}
    report = audit(TextEncoder(), batch, expect)
    assert report.ok, report
    assert [test.holds for test in report.tests if test.name == "influence"] == [True, True], report


def test_the_words_after_an_image_are_examined():
    class Captions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            bart = EncoderAndDecoder(True).bart
            self.patches, self.encoder = torch.nn.Linear(3 * 16, 32), bart.encoder
            self.decoder, self.config = bart.decoder, bart.config

        def forward(self, pixel_values, decoder_input_ids):
            patches = self.patches(pixel_values.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3))
            encoded = self.encoder(inputs_embeds=patches.flatten(1, 2))[0]
            return self.decoder(decoder_input_ids, encoder_hidden_states=encoded, use_cache=False)

    batch = {"pixel_values": torch.randn(2, 3, 16, 20), "decoder_input_ids": IDS}
    report = audit(Captions(), batch, expect_of_bart)
    assert report.ok, report
    assert [test.holds for test in report.tests if test.name == "influence"] == [None, True], report


def test_a_recording_has_the_tests_that_need_no_model():
    model = make_llama(register_backend("inverted"))
    warned = pytest.warns(UserWarning, match="is not that of its record")
    with warned, ch.watch(model, values=True) as seen, torch.no_grad():
        model(**PACKED)
    report = audit(seen, IN_DOCUMENTS)
    assert results(report) == {"given": True, "computed": False}
    model = make_llama()
    with ch.watch(model) as seen, torch.no_grad():
        model(**PACKED)
    assert results(audit(seen, IN_DOCUMENTS)) == {"given": True, "computed": None}


def test_a_report_is_the_same_for_the_same_seed_and_is_json():
    model = make_llama(register_backend("inverted"))
    one, two = (audit(model, PACKED, IN_DOCUMENTS, level="all", seed=3) for _ in range(2))
    assert one.to_dict() == two.to_dict() and str(one) == str(two)
    assert json.loads(json.dumps(one.to_dict()))["ok"] is False


@pytest.mark.parametrize("mask", [CAUSAL, lambda call: CAUSAL], ids=["mask", "function"])
def test_a_call_is_freed_before_the_next_one_ends(monkeypatch, mask):
    alive, add = [], CallTests.add

    def add_and_count(tests, call):
        assert sum(each() is not None for each in alive) == 0
        alive.extend(weakref.ref(tensor) for tensor in (call.query, call.key, call.value, call.outcome.output))
        add(tests, call)

    monkeypatch.setattr(CallTests, "add", add_and_count)
    assert audit(make_llama(), PLAIN, mask).ok
    assert len(alive) == 4 * SMALL["num_hidden_layers"]


def test_an_error_of_a_function_of_the_calls_is_raised_to_the_caller():
    class Forgiving(torch.nn.Module):
        def forward(self, x):
            try:
                return x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
            except ZeroDivisionError:
                return x

    with pytest.raises(ZeroDivisionError):
        audit(Forgiving(), torch.rand(1, 6, 8), lambda call: 1 / 0)


def test_the_random_state_and_the_model_are_left_as_they_were():
    model = make_llama().train()
    state, weights = torch.get_rng_state(), {name: w.clone() for name, w in model.state_dict().items()}
    audit(model, PLAIN, CAUSAL, level="all")
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("code", ["given", "computed", "both", "influence", "not recorded"])
def test_the_conclusion_names_the_part_to_examine(code):
    model, batch, mask = {
        "given": (make_llama(), {**PLAIN, "position_ids": torch.arange(13).expand(2, -1)}, IN_DOCUMENTS),
        "computed": (make_llama(register_backend("wider")), PLAIN, CAUSAL & ch.SlidingWindow(before=12)),
        "both": (make_llama(register_backend("causal alone")), PACKED, IN_DOCUMENTS),
        "influence": (make_lfm2(), PACKED, IN_DOCUMENTS),
        "not recorded": (HandWrittenGPT("block means").eval(), {"input_ids": IDS}, CAUSAL),
    }[code]
    report = audit(model, batch, mask)
    words = {"given": "caller", "computed": "holds", "both": "backend", "influence": "outside of attention"}
    assert words.get(code, code) in report.conclusion, report


def test_an_assertion_holds_the_report():
    assert_attends(make_llama(), PACKED, IN_DOCUMENTS)
    with pytest.raises(AssertionError, match="packed-mask-ignored"):
        assert_attends(make_llama(register_backend("causal alone")), PACKED, IN_DOCUMENTS)


@pytest.mark.parametrize(
    ("batch", "mask", "said"),
    [
        ({"labels": IDS}, CAUSAL, "Name it: inputs="),
        (PLAIN, {7: CAUSAL}, "no layer 7"),
        (PLAIN, "causal", "Pass a Mask"),
        ({**PLAIN, "attention_mask": torch.zeros_like(IDS)}, CAUSAL, "every position is padding"),
        (PLAIN, torch.ones(5, 5, dtype=torch.bool), "5"),
    ],
)
def test_bad_input(batch, mask, said):
    with pytest.raises(ch.ClearheadError, match=said):
        audit(make_llama(), batch, mask)


def test_known_findings_neither_fail_nor_hide_others():
    model = make_llama(register_backend("causal alone"))
    labels = [finding.label for finding in audit(model, PACKED, IN_DOCUMENTS).findings]
    assert "layers.1: documents-mix" in labels
    report = audit(model, PACKED, IN_DOCUMENTS, expect=[*labels, "layers.7: window-lost"])
    assert report.ok and "no longer found: layers.7: window-lost" in str(report)
    report = audit(model, PACKED, IN_DOCUMENTS, expect=[one for one in labels if "layers.1:" not in one])
    assert [finding.label for finding in report.findings] == ["layers.1: documents-mix"]


def test_both_inputs_of_an_encoder_decoder():
    model, length = EncoderAndDecoder(True).bart.eval(), 9
    batch = {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": IDS[:, :length].flip(1)}
    report = audit(model, batch, {"encoder": None, "decoder": CAUSAL, "cross": None}, level="all")
    assert report.ok and [test.name for test in report.tests].count("influence") == 2, report
    assert {"padding (input_ids)", "a later position (decoder_input_ids)"} < report.coverage.keys()
    report = audit(model, batch, {"encoder": None, "decoder": None, "cross": None})
    assert {finding.label for finding in report.findings if finding.test == "influence"} == {"outputs: inputs-ignored"}
    window = {"encoder": ch.SlidingWindow(before=2, after=2), "decoder": CAUSAL, "cross": None}
    codes = {finding.code for finding in audit(model, batch, window, inputs="decoder_input_ids").findings}
    assert "window-lost" in codes


def test_a_leak_is_traced_to_an_input_behind_the_last_output():
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "decoder_input_ids": IDS[:, :4]}
    report = audit(EncoderAndDecoder(False), batch, expect_of_bart, padding=RIGHT)
    (finding,) = (finding for finding in report.findings if finding.test == "influence")
    assert finding.code == "padding-reaches-outputs" and finding.source[1] >= 9, report


def test_a_script_for_a_bug_report_shows_the_movement_without_clearhead():
    model, batch = make_llama(), {**PACKED, "attention_mask": torch.ones_like(IDS)}
    script = ch.models.make_bug_script(audit(model, batch, IN_DOCUMENTS), model, batch)
    assert len(script.splitlines()) <= 30 and "clearhead" not in script
    printed = []
    exec(script, {"print": printed.append})
    assert float(printed[0]) > 0.01
    with pytest.raises(ch.ClearheadError, match="no finding"):
        ch.models.make_bug_script(audit(model, PACKED, IN_DOCUMENTS), model, PACKED)


def test_forward_passes_are_counted_on_the_way():
    class Counted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.passes = make_llama(), 0

        def forward(self, **batch):
            self.passes += 1
            return self.model(**batch)

    model = Counted()
    assert audit(model, PLAIN, CAUSAL, level="outputs").forwards == model.passes <= 11


def test_the_ranks_of_a_spread_model_run_one_batch():
    ranks = on_ranks(2, "ranks.audited_models:audit_spread_models")
    assert ranks[0] == ranks[1]
    for healthy, faulty in ranks[0].values():
        assert healthy["ok"] and "documents-mix" in str(faulty)


def test_padding_of_another_shape_is_an_error():
    with pytest.raises(ch.ShapeError, match="padding has shape"):
        audit(make_llama(), PLAIN, CAUSAL, padding=torch.ones(1, 5))


@pytest.mark.parametrize(
    "examine",
    [
        lambda: audit(ch.models.Recording([]), CAUSAL),
        lambda: audit(lambda pixels: pixels, torch.rand(1, 3, 4, 4), CAUSAL),
    ],
)
def test_an_audit_that_examined_nothing_is_an_error(examine):
    with pytest.raises(ch.ClearheadError, match=r"holds no call|no test could examine the model"):
        examine()


def test_exchanged_ids_differ_and_occur_in_the_batch():
    audited = AuditedModel(make_llama(), PLAIN, "input_ids", None, 0, lambda passes: None)
    changed = torch.arange(IDS.numel()).view(IDS.shape) % 3 == 0
    for seed in range(20):
        audited.seed = seed
        other = audited.replace_ids(changed)
        assert torch.equal(other != IDS, changed)
        assert set(other.flatten().tolist()) <= set(IDS.flatten().tolist())
