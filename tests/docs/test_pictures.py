"""The pictures in docs/pictures are up to date."""

import json
from xml.etree import ElementTree

import pytest
from docs.draw_pictures import CORE, FOLDER, measure_packages, pictures


@pytest.mark.parametrize("name", sorted(pictures()))
def test_each_picture_equals_the_output_of_its_script(name):
    text = pictures()[name]
    ElementTree.fromstring(text)  # raises if the picture is not well-formed XML
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert (FOLDER / name).read_text("utf-8") == text, "run tests/docs/draw_pictures.py"


def test_sizes_and_imports_of_packages_are_measured(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "top.py").write_text("import dovetail.a\n")
    (tmp_path / "a" / "one.py").write_text("from dovetail.b.two import x\nfrom dovetail import b\n")
    (tmp_path / "b" / "two.py").write_text("import dovetail.top\n")
    measured = measure_packages(tmp_path)
    assert measured["(top level)"] == {"files": 1, "lines": 1, "imports": ["a"]}
    assert measured["a"] == {"files": 1, "lines": 2, "imports": ["b"]}
    assert measured["b"] == {"files": 1, "lines": 1, "imports": []}
    assert CORE.is_dir()


@pytest.mark.costly
def test_the_picture_of_the_packages_is_up_to_date():
    drawn = json.loads((FOLDER / "packages_after.json").read_text("utf-8"))
    present = measure_packages()
    remedy = "run tests/docs/draw_pictures.py --measure docs/pictures/packages_after.json"
    assert {name: item["imports"] for name, item in drawn.items()} == {
        name: item["imports"] for name, item in present.items()
    }, remedy
    for name, item in present.items():
        assert drawn[name]["lines"] == pytest.approx(item["lines"], rel=0.1, abs=100), remedy
