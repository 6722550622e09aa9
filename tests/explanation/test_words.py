"""Words of the caller's own name rows and columns, in every form of an explanation."""

import random
import warnings
import xml.dom.minidom

import pytest
import torch

import clearhead as ch

QUERY, KEY = torch.rand(2, 4), torch.rand(3, 4)
OWN, SOURCE = ["Das", "<i>Tier"], ["the", "animal", "$x$"]


def explained(**options):
    return ch.explain(QUERY, KEY, KEY, tokens=OWN, source_tokens=SOURCE, **options)


def test_rows_and_columns_bear_them():
    explanation = explained(mask=ch.Lengths([2]))
    for said in (str(explanation), str(explanation.to_dict())):
        assert all(f"{n} {word}" in said for words in (OWN, SOURCE) for n, word in enumerate(words))
        assert "query 0" not in said and "key 0" not in said
    tables = {entry["name"]: entry["tables"][0] for part in explanation.to_dict()["parts"] for entry in part["steps"]}
    assert tables["weights"]["rows"] == ("0 Das", "1 <i>Tier")
    assert tables["weights"]["columns"] == tables["key"]["rows"] == ("0 the", "1 animal", "2 $x$")
    assert "1 <i>Tier takes" in " ".join(str(explained(at=1)).split())
    for page in (explanation.html(), explanation._repr_html_(), explanation.markdown()):
        assert "<i>Tier" not in page.replace("\\<i>Tier", "") and "animal" in page
    import matplotlib

    matplotlib.use("Agg")
    axes = explanation.plot()
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0 the", "1 animal", r"2 \$x\$"]


class Block(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def with_words(words, title, folder):
    """The files and texts of every form, by name."""
    with ch.watch(block := Block()) as seen:
        block(torch.rand(1, 1, 4, 8))
    explanation = seen.explain(layer=0, head=0, query=2, tokens=words)
    for form in ("html", "md", "txt", "py", "ipynb", "svg"):
        yield form, explanation.write(folder / f"steps.{form}").read_text()
    yield "cell", explanation._repr_html_()
    titled = ch.explain(QUERY, KEY, KEY, title=title)
    for form in ("html", "md", "txt", "py", "ipynb"):
        yield f"{form} with a title", titled.write(folder / f"titled.{form}").read_text()
    yield "frame", titled.frame()._repr_html_()
    yield "report", seen.view(tokens=words, title=title).write(folder / "report.html").read_text()
    seen.plot(0, tokens=words, title=title).figure.savefig(folder / "plot.svg")
    yield "svg of weights", (folder / "plot.svg").read_text()
    ch.Causal().plot(4, query_labels=words, key_labels=words, title=title).figure.savefig(folder / "mask.svg")
    yield "svg of a mask", (folder / "mask.svg").read_text()
    picture = ch.explanation.Picture(40)
    picture.text("word", 5, 5, words[1])
    yield "svg of a motion", picture.svg(title)
    motion = ch.explanation.Motion(title, [(f"It is {words[1]}.", picture)])
    yield "motion", motion.html()
    finding = ch.explanation.Finding("the scale", "warning", f"evidence of {words[1]}", "remedy", {"layer": words[1]})
    found = ch.explanation.Diagnosis([finding], ["something"])
    yield from {"diagnosis": str(found), "md of a diagnosis": found.markdown(), "html": found._repr_html_()}.items()


def test_no_form_has_a_character_that_xml_and_terminals_do_not_take(tmp_path):
    """Byte vocabularies have control characters, and so have decoded texts of a terminal."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    unfit = [*map(chr, (*range(9), *range(11, 13), *range(14, 32), *range(127, 160))), "\ufffe", "\uffff", "\u2028"]
    for signs in (unfit[:1], random.Random(0).sample(unfit[1:], 5)):
        sign = "".join(signs)
        words, title = ["The", f"a{sign}b", sign, "closed"], f"of {sign}{sign}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # matplotlib's fonts lack some signs
            forms = dict(with_words(words, title, tmp_path))
        for form, text in forms.items():
            assert not [sign for sign in unfit if sign in text], form
            if "svg" in form:
                xml.dom.minidom.parseString(text.encode())
    pyplot.close("all")


def test_keys_have_the_words_of_as_many_queries():
    said = str(ch.explain(KEY, KEY, KEY, tokens=SOURCE))
    assert said.count("2 $x$") > 6 and "key 0" not in said
    said = str(ch.explain(QUERY, KEY, KEY, tokens=OWN))
    assert "0 Das" in said and "key 0" in said
    said = str(ch.explain(QUERY, KEY, KEY, source_tokens=SOURCE))
    assert "query 0" in said and "0 the" in said


def test_scores_modules_and_positions_take_them():
    assert "1 animal" in str(ch.explain(torch.rand(2, 3), tokens=OWN, source_tokens=SOURCE))
    attend, x = ch.nn.MultiHeadAttention(4, 2), torch.rand(1, 3, 4)
    for given in (x, x[0]):
        said = str(ch.explain(attend, given, given, given, tokens=SOURCE, at=(0, 1) if given.ndim > 2 else 1))
        assert "1 animal" in said and "position 1" not in said
    said = str(ch.explain(ch.nn.SinusoidalPositionalEncoding(4), x, tokens=SOURCE, at=1))
    assert "1 animal" in said and "0 the" not in said


def test_each_sequence_has_its_own():
    x, each = torch.rand(2, 3, 4), [["ox", "hen", "eel"], ["oak", "ash", "elm"]]
    ids = torch.tensor([[10, 11, 12], [20, 21, 22]])
    for at, (own, other) in ((0, each), (1, each[::-1])):
        said = str(ch.explain(x, x, x, tokens=each, at=at))
        assert all(f"{n} {word}" in said for n, word in enumerate(own))
        assert not any(f"{n} {word}" in said for n, word in enumerate(other))
        assert f"2 {int(ids[at, 2])}" in str(ch.explain(x, x, x, tokens=ids, at=at))
    for tokens in (each, ids):
        with pytest.raises(ch.ShapeError, match="tokens has other words for each of 2 sequences, and 2 are explained"):
            ch.explain(x, x, x, tokens=tokens)
    assert "1 hen" in str(ch.explain(x, x, x, tokens=[each[0]] * 2))


@pytest.mark.parametrize("words", [["a"], ["a", 1], "ab", {"a"}, [], [["a"], ["b"]]], ids=repr)
def test_words_that_do_not_fit_are_refused(words):
    for given in ({"tokens": words}, {"source_tokens": words}):
        with pytest.raises(ch.ClearheadError, match=r"one word belongs to each|words, one for each position"):
            ch.explain(torch.rand(2, 4), torch.rand(2, 4), torch.rand(2, 4), **given)
    with pytest.raises(ch.ClearheadError, match="tokens has 2 words, and there are 3 queries"):
        ch.explain(ch.nn.SinusoidalPositionalEncoding(4), torch.rand(1, 3, 4), tokens=OWN)
