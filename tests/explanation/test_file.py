"""An explanation as a file, whose ending says the form."""

import json

import pytest
import torch

import clearhead as ch


def explanation():
    x = torch.eye(3)
    return ch.explain(x, x, x, mask=ch.Causal())


def test_texts(tmp_path):
    found = explanation()
    said = {"html": found.html(), "md": found.markdown(), "py": found.script(), "txt": f"{found}\n"}
    said["ipynb"] = found.notebook()
    for ending, text in said.items():
        path = found.write(tmp_path / f"steps.{ending}")
        assert path == tmp_path / f"steps.{ending}" and path.read_text(encoding="utf-8") == text
    numbers = json.loads(found.write(tmp_path / "steps.JSON").read_text(encoding="utf-8"))
    assert numbers == json.loads(json.dumps(found.to_dict()))


def test_pictures(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra [plot] is not installed")
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for ending, start in begins.items():
        assert explanation().write(tmp_path / f"weights.{ending}").read_bytes().startswith(start)
    heads = torch.rand(1, 2, 3, 4)
    picture = ch.explain(heads, heads, heads).write(tmp_path / "heads.png").read_bytes()
    assert len(picture) > 1000 and int.from_bytes(picture[16:20], "big") > 700  # pixels across, enough for a slide
    assert pyplot.get_fignums() == []


def test_what_cannot_be_written_is_one_clear_error_before_anything_is_made(tmp_path):
    found = explanation()
    endings = r"\.html, \.md, \.txt, \.py, \.ipynb, \.json, \.png, \.svg or \.pdf"
    for path in ("steps", "steps.docx", tmp_path, 3, None, ""):
        with pytest.raises(ch.ClearheadError, match=endings):
            found.write(path)
    for ending in ("html", "png"):
        with pytest.raises(ch.ClearheadError, match="cannot write the explanation"):
            found.write(tmp_path / "no folder" / f"steps.{ending}")


def test_a_table_as_a_file(tmp_path):
    table = ch.models.Table([{"head": 0, "entropy": 0.1 + 0.2}, {"head": 1, "sink": 1.0}])
    text = "head,entropy,sink\n0,0.30000000000000004,\n1,,1.0\n"
    assert table.write(tmp_path / "heads.csv").read_text(encoding="utf-8") == text
    with pytest.raises(ch.ClearheadError, match=r"ends in \.csv"):
        table.write(tmp_path / "heads.html")
