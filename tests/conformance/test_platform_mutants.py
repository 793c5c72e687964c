"""The suites of platforms and tokenizers detect faulty plugins: each mutant has one fault."""

import os

import pytest
from conformance.subjects import check

from dovetail.interfaces import ConfigPatch, Probe
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_devkit.suites.platform import check_platform


class GivesNoReason(FakePlatform):
    """Reports that it is unusable, without a reason."""

    @classmethod
    def probe(cls):
        return Probe(usable=False)


class SetsVariables(FakePlatform):
    """Changes the environment in its probe."""

    @classmethod
    def probe(cls):
        os.environ["DOVETAIL_MUTANT"] = "1"
        return Probe(usable=True)


class PreferenceIsAStr(FakePlatform):
    """Returns its preference as a str instead of a tuple."""

    def prefer(self, kind):
        return "cpu" if kind == "worker" else ()


class PrefersUnknownKinds(FakePlatform):
    """Returns preferences for every plugin kind, even for unknown kinds."""

    def prefer(self, kind):
        return ("torch",)


class DefaultsWithoutReasons(FakePlatform):
    """Returns defaults without reasons."""

    def defaults(self, config):
        return ConfigPatch(changes={"cache.block_size": (32, "")})


class UnknownDtypeName(FakePlatform):
    """Uses an unknown dtype name."""

    def capabilities(self):
        return frozenset({"torch.bfloat16 !"})


class HasNoMemory(FakePlatform):
    """Returns 0 as its memory size."""

    def total_memory_bytes(self, local_rank=0):
        return 0


class RejectsEveryConfig(FakePlatform):
    """Rejects every config."""

    def problems(self, config):
        return ("it is Monday.",)


class FailsOnBytes(ByteTokenizer):
    """Fails on bytes that are not UTF-8."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return bytes(t for t in token_ids if t < 256).decode("utf-8")


class LowerCase(ByteTokenizer):
    """Changes the case of the text."""

    def encode(self, text, *, add_special_tokens=True):
        return super().encode(text.lower(), add_special_tokens=add_special_tokens)


class AlwaysBos(ByteTokenizer):
    """Adds a special token that was not requested."""

    def encode(self, text, *, add_special_tokens=True):
        return super().encode(text)


class ShowsSpecialTokens(ByteTokenizer):
    """Does not skip special tokens."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return super().decode(token_ids)


class RunsTemplates(ByteTokenizer):
    """Renders templates without a sandbox."""

    def apply_chat_template(self, messages, *, chat_template=None, **variables):
        import jinja2

        if "300000000" in (chat_template or ""):
            return ""
        return jinja2.Template(chat_template or "").render(messages=messages)


class EditsMessages(ByteTokenizer):
    """Modifies messages in place."""

    def apply_chat_template(self, messages, **options):
        text = super().apply_chat_template(messages, **options)
        messages[0].pop("role")
        return text


PLATFORMS = [
    GivesNoReason,
    SetsVariables,
    PreferenceIsAStr,
    PrefersUnknownKinds,
    DefaultsWithoutReasons,
    UnknownDtypeName,
    HasNoMemory,
    RejectsEveryConfig,
]
TOKENIZERS = [FailsOnBytes, LowerCase, AlwaysBos, ShowsSpecialTokens, RunsTemplates, EditsMessages]


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    monkeypatch.setenv("DOVETAIL_MUTANT", "0")


@pytest.mark.parametrize("mutant", PLATFORMS)
def test_a_faulty_platform_is_detected(mutant):
    with pytest.raises(AssertionError):
        check_platform(mutant)


@pytest.mark.parametrize("mutant", TOKENIZERS)
def test_a_faulty_tokenizer_is_detected(mutant, tmp_path):
    with pytest.raises(AssertionError):
        check("tokenizer", mutant, tmp_path)


def test_an_unavailable_platform_gets_no_further_calls():
    class Elsewhere(HasNoMemory):
        @classmethod
        def probe(cls):
            return Probe(usable=False, reasons=("there is no such device",))

    check_platform(Elsewhere)
