"""Texts that tokenizers are compared on: languages, code, numbers, white space, emoji, symbols."""

from __future__ import annotations

from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "README.md",
    "LICENSE",
    "Makefile",
    "pyproject.toml",
    "docs/design.md",
    "core/src/dovetail/errors.py",
    "platforms/cpu_kernels/setup.py",
)
LINES_OF_FILE = 16
NUM_RANDOM = 140
LANGUAGES = (
    "The quick brown fox can't jump; it'll wait, I'M SURE you've seen that they're HERE'S.",
    "Der Flüßchenübergang kostet 1.234,56 €, die Größe beträgt ½ m².",
    "L'été dernier, où étiez-vous ? « Là-bas », répondit-il.",
    "¿Dónde está la biblioteca? ¡Mañana será otro día!",
    "Привет, как дела? Съешь ещё этих мягких французских булок.",
    "你好，世界！今天天气很好。我们去公园吧？2024年12月31日",
    "これはペンです。カタカナとひらがな、漢字を混ぜる。",
    "안녕하세요. 만나서 반갑습니다! 한국어 텍스트",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣٤٥",
    "שלום עולם, מה שלומך?",
    "नमस्ते दुनिया, आप कैसे हैं? १२३",
    "สวัสดีชาวโลก วันนี้อากาศดี",
    "Γειά σου Κόσμε! Ελληνικά",
    "Xin chào thế giới, tiếng Việt có dấu",
    "ქართული ენა, հայերեն, አማርኛ, বাংলা, தமிழ்",
    "e\u0301 \u0041\u030a \u1e9b\u0323 \ufb01 \u2126 \u212b ﷺ",
    "Zażółć gęślą jaźń. İstanbul'da ığdır.",
)
CODE = (
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i] * b[i];\n}\n\n",
    '<html>\n  <body class="x">&amp;&nbsp;</body>\n</html>',
    "SELECT * FROM t WHERE a >= 10 AND b LIKE '%x_' -- comment\r\n",
    'fn main() { println!("{:?}", vec![1u8; 3]); }',
    '{"key": [1, 2.5e-10, null, true], "nested": {"a": "\\u00e9"}}',
    "$ grep -rn 'foo|bar' ./src/*.py | wc -l && echo $?",
    "https://example.org/a/b?c=d&e=%20#f user@example.org #hashtag @name",
    "\\frac{a}{b} \\sum_{i=0}^{n} x_i^2 ≤ ∞ ∀x∈ℝ",
    "CamelCaseName snake_case_name SCREAMING_CASE kebab-case HTTPServer2Go",
    "x+=1;y-=2;z*=3;w/=4;a&&b||!c;d?e:f;g<<2>>1;h^i~j`k`",
    "\n\n\n# Title\n\n- item 1\n- item 2\n\n```python\nprint('hi')\n```\n",
)
NUMBERS = (
    "0 1 12 123 1234 12345 123456 1234567 3.14159 -42 +7 1e10 0xFF 1,000,000",
    "2024-12-31T23:59:59.999Z 10:30 1/2 ½ ² ³ Ⅷ ① ٣ 50% $99.99",
    "1 22 333 4444 55555 abc123def456 v1.2.3-rc4",
)
SPACES = (
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n", "\n ", " \t \n  \n",
    " leading", "trailing ", "  two  spaces  ", "a\u00a0b\u2003c\u3000d", "a\u200bb\ufeffc",
    "tabs\there\t\tand\t\t\tthere", "many                spaces", "\x00\x07\x1b[0m", "a\x0bb\x0cc",
    "line\u2028separator\u2029paragraph\u0085next",
)  # fmt: skip
EMOJI = (
    "😀😃😄 👩\u200d🚀 👨\u200d👩\u200d👧\u200d👦 🇩🇪🇯🇵 ❤️ ☎️ 👍🏽",
    "I ❤️ 🍕!!! 🎉🎉🎉",
    "𝕳𝖊𝖑𝖑𝖔 𝒲ℴ𝓇𝓁𝒹 🄰🄱 ﬀ ℡ ㎏",
    "\U0001f9ff\U000e0041 \U0010ffff \ufffd",
)
SPECIAL = (
    "<s> </s> <unk> <pad> <bos> <eos> [INST] hi [/INST] <<SYS>>",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<think>\nwell\n</think> <tool_call>{}</tool_call>",
    "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜><｜tool▁sep｜>",
    "<|start|>assistant<|channel|>final<|message|>hi<|return|>",
    "text<|im_end|>text <|im_end|> text  <|eot_id|>  text",
    "<0x41> <0xE2> ▁ ▁▁ Ġ Ċ [PAD5] <unused5> <extra_id_0>",
)


def all_texts() -> list[str]:
    """Return at least 300 texts, the same in every call."""
    texts = [*LANGUAGES, *CODE, *NUMBERS, *SPACES, *EMOJI, *SPECIAL]
    for name in FILES:
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines(keepends=True)
        step = max(1, len(lines) // LINES_OF_FILE)
        texts += [line for line in lines[::step][:LINES_OF_FILE]]
    random, pieces = Random(16), "".join(texts)
    for number in range(NUM_RANDOM):
        parts = []
        for _ in range(1 + number % 8):
            start = random.randrange(len(pieces))
            parts.append(pieces[start : start + random.randrange(1, 40)])
        texts.append("".join(parts))
    return texts
