"""Which case counts a public entry, and why some have none: tests/test_fake_cuda.py."""

CASES = {  # where the name of the case is another than the entry's
    "ALiBi": "ALiBi", "Additive": "Additive", "BiasFunction": "bias by a function",
    "Bilinear": "Bilinear, built before", "results.Weights": "reduce",
    "Bilinear.from_weights": "Bilinear", "Causal": "causal, training", "Cosine": "Cosine",
    "DenseMask": "dense, training", "Documents": "documents, training", "Dot": "softcap", "Gaussian": "Gaussian",
    "FirstKeys": "first keys, training",
    "Lengths": "lengths, training", "MaskFunction": "rule, training", "Padding": "padding, training",
    "PrefixLM": "prefix, training", "SlidingWindow": "window, training",
    "Weights.reduce": "reduce", "weights": "reduce", "attention": "attention, training",
    "nn.KeyValueCache": "decoding with a cache", "nn.PreparedKeys": "MultiHeadAttention.prepare",
    "reductions.Entropy": "reduce", "reductions.LogSumExp": "reduce", "reductions.MaxScore": "reduce",
    "reductions.Received": "reduce", "reductions.TopK": "reduce", "edit": "edits.Knockout",
}  # fmt: skip
READER = "it is for a person, who reads its numbers on the host"
MODELS = "it runs a model and shows what was read: tests/models, on a CPU"
APART = {
    "Weights.plot": READER, "diagnose": READER, "explain": READER,
    **dict.fromkeys((
        "audit", "assert_attends", "models.audit_collator", "models.make_audit_callback", "models.lazy_attentions",
        "models.match_tokens",
        "models.monitor", "models.run_on_clearhead", "models.statistics", "models.survey",
    ), MODELS),
    **dict.fromkeys(("models.circuits", "models.logit_attribution"), MODELS),
    "edits.Edit": "abstract", "nn.set_recording": "it computes nothing",
}  # fmt: skip


def case_of(name):
    """The case that counts an entry, by its name without the namespace of modules, where no other is named."""
    return CASES.get(name, name.removeprefix("nn."))
